"""Which live GPUs work together: a pure choice of sequence-parallel groups after every change of membership.

The choice minimises the predicted time until the waiting requests are done, then the number of GPUs that must
change group, then the degree. Groups stay within a node; only GPUs that are too few for any legal degree on
their own node may be joined across nodes. What is left over serves alone or stands by.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.core.types import Gpu
from spotlight.errors import ConfigError

Members = tuple[Gpu, ...]
Seconds = Callable[[int, int], float]
"""Predicted seconds of one request: (image tokens, degree) -> s."""


@dataclass(frozen=True, slots=True)
class Load:
    """`count` waiting requests of `rows` image tokens each."""

    rows: int
    count: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What makes a degree possible. Weights are whole on every rank; activations shrink with the degree."""

    heads: int
    max_degree: int = 8
    min_rows: int = 4
    even_heads: bool = False
    """Only degrees that divide the heads: uneven ones work, but their slowest rank sets the pace."""
    weights_bytes: int = 0
    row_bytes: int = 0
    """Activation memory per image token that a rank holds."""
    gpu_bytes: int | None = None
    """Memory of one GPU; None: not checked."""

    def refusal(self, degree: int, rows: int) -> str | None:
        """Why groups of `degree` cannot make images of `rows` tokens; None if they can."""
        if degree < 1:
            return f"degree {degree} is below 1"
        if degree > self.max_degree:
            return f"degree {degree} is above the allowed {self.max_degree}"
        if degree > self.heads:
            return f"degree {degree} exceeds the {self.heads} attention heads"
        if self.even_heads and self.heads % degree:
            return f"{self.heads} attention heads do not split evenly over {degree} ranks"
        if degree > 1 and rows < degree * self.min_rows:
            return f"{rows} image tokens over {degree} ranks are fewer than {self.min_rows} each"
        need = self.weights_bytes + math.ceil(rows / degree) * self.row_bytes
        if self.gpu_bytes is not None and need > self.gpu_bytes:
            return f"degree {degree} needs {need / 1e9:.1f} GB a GPU, which has {self.gpu_bytes / 1e9:.1f}"
        return None


@dataclass(frozen=True, slots=True)
class Regrouping:
    """The choice. The first member of a group leads it.

    `groups` and `spares` together are exactly the live GPUs; `moves` counts the GPUs in groups that did not
    exist before; `makespan_s` is the predicted time for the load; `refused` says why a degree was no option.
    """

    groups: tuple[Members, ...]
    spares: Members
    moves: int
    makespan_s: float
    refused: Mapping[int, str] = field(default_factory=dict)


def regroup(
    live: Iterable[Gpu],
    current: Sequence[Members],
    loads: Sequence[Load],
    limits: Limits,
    seconds: Seconds,
    *,
    degree: int | None = None,
    move_s: float = 0.0,
) -> Regrouping:
    """Form groups from the `live` GPUs; `current` are the groups as they were, lost members included.

    `degree` fixes the size that groups have where there are GPUs enough; None chooses it. Groups change only
    where that saves more than `move_s`. The same call with its own result as `current` changes nothing.
    Raises ConfigError, with the reason, if the fixed degree or every degree is impossible.
    """
    gpus = sorted(set(live), key=_place)
    rows = [load.rows for load in loads if load.count > 0]
    legal, refused = legal_degrees(limits, rows)
    if degree is not None and degree not in legal:
        reason = refused.get(degree) or f"degree {degree} is not possible"
        raise ConfigError(f"sp_degree {degree}: {reason}", hint=f"possible: {_listed(legal)}")
    if not legal:
        raise ConfigError(
            f"no sequence-parallel degree works: {'; '.join(refused[d] for d in sorted(refused))}",
            hint="smaller images, GPUs with more memory, or a smaller model",
        )
    if not gpus:
        return Regrouping((), (), 0, 0.0 if not rows else math.inf, refused)
    targets = [degree] if degree is not None else [d for d in legal if d <= max(len(gpus), legal[0])]
    options = []
    for target in targets:
        groups, spares = _pack(gpus, current, target, [d for d in legal if d <= target])
        known = {frozenset(group) for group in current}
        moves = sum(len(group) for group in groups if frozenset(group) not in known)
        makespan = _makespan(groups, loads, limits, seconds)
        cost = makespan + (move_s if moves else 0.0)
        options.append((cost, moves, target, Regrouping(groups, spares, moves, makespan, refused)))
    return min(options, key=lambda option: option[:3])[3]


def legal_degrees(limits: Limits, rows: Sequence[int]) -> tuple[list[int], dict[int, str]]:
    """Degrees that can serve at least one of the sizes `rows` (any size if empty), and why others cannot."""
    legal, refused = [], {}
    for degree in range(1, max(limits.max_degree, limits.heads) + 1):
        sizes = rows or [degree * limits.min_rows]
        reasons = [limits.refusal(degree, size) for size in sizes]
        if all(reasons):
            refused[degree] = str(reasons[0])
        else:
            legal.append(degree)
    return legal, refused


def _pack(
    gpus: Sequence[Gpu], current: Sequence[Members], target: int, legal: Sequence[int]
) -> tuple[tuple[Members, ...], Members]:
    """Groups of `target` where a node has the GPUs, smaller legal ones from the rest; (groups, spares)."""
    alive = set(gpus)
    # A group across nodes is not kept for its own sake: it comes out again below where it must.
    groups = [
        g for g in current if len(g) == target and alive.issuperset(g) and len({m.node for m in g}) == 1
    ]
    placed = {gpu for group in groups for gpu in group}
    was_in = _former_place(current, alive)
    left_over: list[Gpu] = []
    for node in dict.fromkeys(gpu.node for gpu in gpus):
        free = sorted((g for g in gpus if g.node == node and g not in placed), key=was_in)
        while size := max((d for d in legal if d <= len(free)), default=0):
            groups.append(tuple(free[:size]))
            free = free[size:]
        left_over += free
    # Too few on each node: join what is left across nodes, the smallest legal groups first to survive most.
    left_over.sort(key=was_in)
    while len(left_over) >= legal[0]:
        groups.append(tuple(left_over[: legal[0]]))
        left_over = left_over[legal[0] :]
    return tuple(_as_before(group, current) for group in groups), tuple(sorted(left_over, key=_place))


def _former_place(current: Sequence[Members], alive: set[Gpu]) -> Callable[[Gpu], tuple]:
    """Sort key that keeps GPUs together which were together, largest surviving part first, in their order."""
    parts = sorted(
        ([gpu for gpu in group if gpu in alive] for group in current),
        key=lambda part: (-len(part), part and _place(part[0])),
    )
    order = {gpu: i for i, gpu in enumerate(gpu for part in parts for gpu in part)}
    return lambda gpu: (order.get(gpu, len(order)), _place(gpu))


def _as_before(group: Members, current: Sequence[Members]) -> Members:
    """The same GPUs in the order they had, so that an unchanged group is equal to its former self."""
    return next((former for former in current if set(former) == set(group)), group)


def _makespan(groups: Sequence[Members], loads: Sequence[Load], limits: Limits, seconds: Seconds) -> float:
    """Time until all is done, the longest request first, each on the group that ends it soonest."""
    heaps: dict[int, list[float]] = {}
    for group in groups:
        heaps.setdefault(len(group), []).append(0.0)
    end = 0.0
    for load in sorted(loads, key=lambda load: -load.rows):
        able = [d for d in heaps if limits.refusal(d, load.rows) is None]
        if load.count > 0 and not able:
            return math.inf
        cost = {d: seconds(load.rows, d) for d in able}
        for _ in range(load.count):
            best = min(able, key=lambda d: (heaps[d][0] + cost[d], d))
            done = heaps[best][0] + cost[best]
            heapq.heapreplace(heaps[best], done)
            end = max(end, done)
    return end


def _place(gpu: Gpu) -> tuple[str, int]:
    return gpu.node, gpu.index


def _listed(degrees: Sequence[int]) -> str:
    return ", ".join(map(str, degrees)) or "none"
