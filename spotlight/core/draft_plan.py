"""What comes out of an iteration's drafting: the seeds to regenerate, and the figures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spotlight.core.draft_book import DraftBook
from spotlight.core.draft_cost import DraftSetting
from spotlight.core.rank_trust import Rho
from spotlight.core.select import Selector


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """The seeds to regenerate for one row, ascending; `control` are those of them taken at random."""

    row: int
    seeds: tuple[int, ...]
    control: tuple[int, ...]
    num_drafts: int


@dataclass(frozen=True, slots=True)
class DraftStats:
    """One iteration's drafting in figures.

    `slots_offered` is worker time until the deadline over the time of a draft. `overrun` is the draft time
    still owed when training ended, over the worker time offered. Variances are means over the groups that
    were drafted: of the kept seeds' draft rewards, and of all their drafts (what random seeds would have).
    """

    slots_offered: int
    slots_used: int
    failed: int
    cancelled: int
    returned: int
    budget_s: float
    used_s: float
    overrun: float
    kept_variance: float
    random_variance: float
    zero_variance_share: float

    @property
    def gain_per_gpu_s(self) -> float:
        """Variance won over random seeds per worker-second of drafting."""
        return (self.kept_variance - self.random_variance) / self.used_s if self.used_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next roll-out makes: one group per row, in the order of the rows."""

    iteration: int
    groups: tuple[KeptGroup, ...]
    stats: DraftStats


@dataclass(frozen=True, slots=True)
class ExploreReport:
    """An iteration's `DraftStats`, with what was learned when the regenerated images were scored.

    `rho` comes from random control seeds of this and earlier iterations; `kept_slope` is this iteration's
    regression of final on draft reward over the kept seeds, which picking by draft reward does not bias.
    `note` says why exploration is off, and is empty while it is on.
    """

    stats: DraftStats
    setting: DraftSetting | None
    rho: Rho
    kept_slope: float | None
    final_variance: float
    final_zero_variance_share: float
    note: str


def keep_seeds(book: DraftBook, select: Selector, control_share: float, seed: int) -> tuple[KeptGroup, ...]:
    """The k seeds of every row: the selector's choice of its drafts, filled up with fresh seeds.

    Over the run `control_share` of the kept seeds are random ones of the row's drafts instead, each in the
    place of the kept seed nearest to the group's mean. Depends on the rewards and `seed` alone.
    """
    rng = np.random.default_rng((seed, book.iteration))
    kept = [_keep(book, i, select, rng) for i in range(len(book.rows))]
    controls = _controls(book, kept, control_share, rng)
    return tuple(
        KeptGroup(
            row,
            tuple(book.first_seed + j for j in sorted(kept[i])),
            tuple(book.first_seed + j for j in sorted(controls[i])),
            len(book.usable(i)),
        )
        for i, row in enumerate(book.rows)
    )


def _keep(book: DraftBook, i: int, select: Selector, rng: np.random.Generator) -> list[int]:
    numbers, rewards = book.usable(i), book.rewards(i)
    chosen = [numbers[c] for c in select(rewards.tolist(), book.k, rng)]
    fresh = int(book.issued[i])
    return chosen + list(range(fresh, fresh + book.k - len(chosen)))


def _controls(
    book: DraftBook, kept: list[list[int]], share: float, rng: np.random.Generator
) -> list[list[int]]:
    """Put random seeds into `kept`; returns them by row index."""
    controls: list[list[int]] = [[] for _ in kept]
    drafted = [i for i in range(len(kept)) if book.usable(i)]
    per_iteration = share * len(kept) * book.k
    number = math.floor(per_iteration * (book.iteration + 1)) - math.floor(per_iteration * book.iteration)
    for turn in range(number if drafted else 0):
        if turn % len(drafted) == 0:
            order = rng.permutation(drafted).tolist()
        i = order[turn % len(drafted)]
        free = [j for j in book.usable(i) if j not in controls[i]]
        if len(controls[i]) == book.k or not free:
            continue
        control = int(rng.choice(free))
        if control not in kept[i]:
            _replace_middle(book, i, kept[i], control, controls[i])
        controls[i].append(control)
    return controls


def _replace_middle(book: DraftBook, i: int, kept: list[int], control: int, spared: list[int]) -> None:
    """Put `control` in the place of the kept seed that the group's variance misses least."""
    known = book.answered[i]
    reward = {j: value for j in kept if (value := known.get(j)) is not None}
    mean = sum(reward.values()) / max(len(reward), 1)
    distance = {j: abs(reward.get(j, mean) - mean) for j in kept if j not in spared}
    kept[kept.index(min(distance, key=lambda j: (distance[j], j)))] = control


def variances(book: DraftBook, i: int, group: KeptGroup) -> tuple[float, float]:
    """Sample variance of the draft rewards of the kept seeds, and of all drafts of row index i."""
    known = book.answered[i]
    kept = [value for seed in group.seeds if (value := known.get(seed - book.first_seed)) is not None]
    return float(np.var(kept, ddof=1)) if len(kept) > 1 else 0.0, float(np.var(book.rewards(i), ddof=1))
