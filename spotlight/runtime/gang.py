"""A gang: the ranks that serve one request together, and the one party that decides who they are.

`velocity` runs one denoising step's forward sharded over the ranks. When a rank dies, freezes or leaves, the
gang forms anew on the survivors and runs the forward again, so the caller only sees a step that took longer.

How it stays simple to reason about:
* Only the gang decides. A group is an ordered list of ranks and an epoch that grows; replies of an epoch that
  has passed are dropped here, commands of one are refused there.
* No rank begins a step before it is told to. A stop therefore needs no agreement between ranks: the step in
  flight is the last (`stop_at` = that step + 1), and a rank that has been warned leaves after it.
* After a fault every survivor is called out of the old group; one that does not come out counts as lost.
* Forming that is not complete in time is given up, and tried again under a new epoch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.distributed import TCPStore

from spotlight.core.regroup import Limits, Load, Seconds, regroup
from spotlight.core.types import Gpu, Group
from spotlight.errors import CommError, ConfigError, IntegrityError, RunError
from spotlight.rl.models import Conditioning, ModelAdapter
from spotlight.runtime.link import Frame, Head, encode
from spotlight.runtime.roster import Member, Roster, Spawner, Timing
from spotlight.store.tensors import digest

_T = TypeVar("_T")
_ERRORS = {"config": ConfigError, "integrity": IntegrityError}


@dataclass(frozen=True, slots=True)
class Recovery:
    """One change of group, in monotonic times of this process.

    `noticed_at` first sign of it, `stopped_at` all survivors out of the old group, `decided_at` new members
    chosen, `formed_at` all connected and bound, `done_at` first forward finished. `bind_s` is the part of
    forming in which the slowest rank pointed its model at the new group.
    """

    reason: str
    degree_before: int
    degree_after: int
    noticed_at: float
    stopped_at: float
    decided_at: float
    formed_at: float
    done_at: float
    bind_s: float


@dataclass(slots=True)
class _Change:
    """The recovery under way."""

    reason: str
    degree_before: int
    noticed_at: float
    stopped_at: float = 0.0
    decided_at: float = 0.0
    formed_at: float = 0.0
    bind_s: float = 0.0

    def finish(self, degree: int) -> Recovery:
        return Recovery(
            reason=self.reason,
            degree_before=self.degree_before,
            degree_after=degree,
            noticed_at=self.noticed_at,
            stopped_at=self.stopped_at,
            decided_at=self.decided_at,
            formed_at=self.formed_at,
            done_at=time.monotonic(),
            bind_s=self.bind_s,
        )


class _Broken(Exception):
    """The group cannot go on: members are lost, or a collective failed. Never leaves this module."""


class Gang:
    """Not thread-safe, except `warn`. Close it, or use it as a context manager."""

    def __init__(
        self,
        name: str,
        spawners: Mapping[str, Spawner],
        limits: Limits,
        rows: int,
        *,
        degree: int | None = None,
        seconds: Seconds = lambda rows, degree: rows / degree,
        timing: Timing | None = None,
        address: str = "127.0.0.1",
        first_epoch: int = 1,
    ) -> None:
        """`name` is unique among gangs; `spawners` by node; `rows` are the image tokens of one sample.

        `degree` fixes the size of the group while there are GPUs for it; else `seconds` decides. `address` is
        the IP of this machine that ranks reach. `first_epoch` must exceed all epochs this name ever had.
        """
        self.timing = timing or Timing()
        self.recoveries: list[Recovery] = []
        self._name, self._limits, self._rows = name, limits, rows
        self._degree, self._seconds, self._address = degree, seconds, address
        self._store: TCPStore | None = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._roster = Roster(spawners, self.timing, address)
        self._roster.epoch = first_epoch - 1
        self._seq = itertools.count()
        self._group: list[Member] = []
        self._warned: set[Gpu] = set()
        self._change: _Change | None = None
        self._weights: tuple[Mapping[str, Tensor], str] | None = None

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def group(self) -> Group:
        """Who works together, the leader first. Empty before the first forward and after a fault."""
        return Group(tuple(member.gpu for member in self._group), self._roster.epoch)

    @property
    def live(self) -> tuple[Gpu, ...]:
        """GPUs whose rank is up, spares included."""
        return tuple(member.gpu for member in self._roster.ready)

    @property
    def pids(self) -> dict[Gpu, int]:
        """Process ids of the ranks that were asked for and are not lost."""
        return {member.gpu: member.pid for member in self._roster.members}

    @property
    def stale_replies(self) -> int:
        """Replies of past epochs that were dropped."""
        return self._roster.stale_replies

    def add(self, gpus: Iterable[Gpu], device: Callable[[Gpu], str] = lambda gpu: "cpu") -> None:
        """Ask for a rank on each GPU. They join between two steps once they are up; nothing waits for them.

        (The first rank of a node waits for its zygote to have loaded the model.)
        ValueError for a GPU that has one; RunError if its node cannot start one.
        """
        for gpu in gpus:
            self._roster.add(gpu, device(gpu))

    def wait_ready(self) -> None:
        """Until every rank that was asked for is up or lost. CommError if none is up then."""
        while any(not member.ready for member in self._roster.members):
            self._roster.pump()
        if not self._roster.members:
            raise CommError(f"no rank of gang {self._name} came up", hint="see the ranks' stderr")

    def warn(self, gpu: Gpu) -> None:
        """A preemption notice: the step in flight is the last this GPU takes part in. From any thread."""
        self._warned.add(gpu)

    def bind(self, tensors: Mapping[str, Tensor]) -> str:
        """Give all ranks, and all that join later, these weights; returns their digest.

        IntegrityError if a rank ends up with anything else; then the gang serves nothing until a bind succeeds.
        For use between trajectories.
        """
        self._weights = (tensors, digest(tensors))
        for member in self._roster.members:
            member.holds_weights = False
        self._until_whole(self._bind_weights)
        return self._weights[1]

    def velocity(
        self,
        latents: Tensor,
        t: Tensor,
        cond: Mapping[str, Tensor],
        *,
        negative: Mapping[str, Tensor] | None = None,
        cfg: float = 1.0,
    ) -> Tensor:
        """`ModelAdapter.velocity`, sharded. CommError when no rank is left or the group will not form."""
        tensors = {"latents": latents, "t": t}
        tensors |= {f"cond.{name}": tensor for name, tensor in cond.items()}
        tensors |= {f"negative.{name}": tensor for name, tensor in (negative or {}).items()}
        self._roster.forgive()
        return self._until_whole(lambda: self._forward(tensors, cfg))

    def close(self) -> None:
        """End all ranks; zygotes stay."""
        self._roster.close()
        self._store = None

    def _until_whole(self, attempt: Callable[[], _T]) -> _T:
        """Do `attempt` with a group that stands, as often as members can be lost and a bit more."""
        for _ in range(3 + len(self._roster.members)):
            try:
                self._ensure_group()
                return attempt()
            except _Broken as fault:
                self._stop_group(str(fault))
        raise CommError(f"gang {self._name} could not complete a step", hint="see the ranks' stderr")

    def _forward(self, tensors: Mapping[str, Tensor], cfg: float) -> Tensor:
        head = {"op": "velocity", "epoch": self._roster.epoch, "seq": next(self._seq), "cfg": cfg}
        frame = encode(head, tensors)
        answers = self._ask(head, dict.fromkeys(self._group, frame))
        if self._change is not None:
            self.recoveries.append(self._change.finish(len(self._group)))
            self._change = None
        self._roster.losses.clear()
        return answers[0][1]["v"]

    def _bind_weights(self) -> None:
        """Bring members that lack the newest weights up to date."""
        late = [member for member in self._roster.ready if not member.holds_weights]
        if self._weights is None or not late:
            return
        tensors, expected = self._weights
        head = {"op": "bind", "epoch": self._roster.epoch}
        for answer, _ in self._ask(head, dict.fromkeys(late, encode(head, tensors))):
            if answer["digest"] != expected:
                raise IntegrityError(f"a rank bound weights {answer['digest']}, sent were {expected}")
        for member in late:
            member.holds_weights = True

    def _ensure_group(self) -> None:
        """Form the group that is best now, unless it stands already."""
        self._roster.pump(wait=False)
        self._retire_warned()
        while not self._roster.ready:
            if not self._roster.members:
                raise CommError(f"all ranks of gang {self._name} are lost")
            self._roster.pump()  # somebody is still coming up
        self._bind_weights()
        chosen = self._choose()
        if chosen == self._group:
            return
        if self._group:
            self._notice(f"{len(chosen)} ranks instead of {len(self._group)}")
        self._form(chosen)

    def _choose(self) -> list[Member]:
        by_gpu = {member.gpu: member for member in self._roster.ready}
        current = [tuple(member.gpu for member in self._group)] if self._group else []
        # A fixed degree holds while there are GPUs for it; after that, the best that the rest allows.
        degree = self._degree if self._degree is not None and self._degree <= len(by_gpu) else None
        load = [Load(self._rows, 1)]
        result = regroup(by_gpu, current, load, self._limits, self._seconds, degree=degree)
        if not result.groups:
            raise CommError(f"{len(by_gpu)} GPUs of gang {self._name} are too few for any legal group")
        return [by_gpu[gpu] for gpu in max(result.groups, key=len)]

    def _form(self, chosen: list[Member]) -> None:
        if self._change is not None:
            self._change.decided_at = time.monotonic()
            self._change.stopped_at = self._change.stopped_at or self._change.decided_at
        if self._store is None:
            raise CommError(f"gang {self._name} is closed")
        self._roster.epoch += 1
        head = {
            "op": "form",
            "epoch": self._roster.epoch,
            "name": f"sp/{self._name}/{self._roster.epoch}",
            "store": [self._address, self._store.port],
            "size": len(chosen),
            "form_timeout_s": self.timing.form_timeout_s,
            "op_timeout_s": self.timing.op_timeout_s,
        }
        self._group = chosen  # already now: a fault while forming must call these back
        frames = {member: encode({**head, "rank": rank}) for rank, member in enumerate(chosen)}
        # Ranks give up by themselves; the margin lets their reason arrive.
        answers = self._ask(head, frames, self.timing.form_timeout_s + self.timing.heartbeat_s)
        if self._change is not None:
            self._change.formed_at = time.monotonic()
            self._change.bind_s = max(answer["bind_s"] for answer, _ in answers)

    def _ask(self, head: Head, frames: Mapping[Member, bytes], timeout_s: float | None = None) -> list[Frame]:
        """Send a command to some members and return their answers, in order. _Broken on any fault."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for member, frame in frames.items():
            self._roster.ask(member, frame)
        while True:
            lost = [member for member in frames if member not in self._roster.members]
            if lost:
                raise _Broken(f"lost {', '.join(map(str, lost))}")
            answers = [member.answer for member in frames if member.answer is not None]
            for answer, _ in answers:
                if answer["op"] == "failed":
                    self._raise(answer)
            if len(answers) == len(frames):
                return answers
            if deadline is not None and time.monotonic() > deadline:
                raise _Broken(f"{len(frames) - len(answers)} ranks did not answer to {head['op']}")
            self._roster.pump()

    def _raise(self, answer: Head) -> None:
        """A broken collective is worth another try, anything else a rank says would only come again."""
        if answer["code"] in ("comm", "fenced"):
            raise _Broken(answer["message"])
        self._stop_group(answer["message"])
        self._change = None
        error = _ERRORS.get(answer["code"], RunError)
        raise error(f"a rank of gang {self._name} failed: {answer['message']}")

    def _stop_group(self, reason: str) -> None:
        """Call every member out of the group; whoever does not come out in time is lost."""
        self._notice(reason)
        for member in self._group:
            self._roster.send(member, encode({"op": "abort", "epoch": self._roster.epoch}))
        deadline = time.monotonic() + self.timing.dead_after_s
        while inside := [m for m in self._roster.members if m.pending]:
            if time.monotonic() > deadline:
                for member in inside:
                    self._roster.lose(member, "did not come out of an aborted group")
                break
            self._roster.pump()
        self._group = []
        if self._change is not None:
            self._change.stopped_at = time.monotonic()

    def _retire_warned(self) -> None:
        """Between two steps nobody is inside a collective, so members can go without an abort."""
        for gpu in list(self._warned):
            self._warned.discard(gpu)
            for member in [m for m in self._roster.members if m.gpu == gpu]:
                if member in self._group:
                    self._notice(f"{member} was warned")
                self._roster.lose(member, "was warned")
        if any(member not in self._roster.members for member in self._group):
            self._notice("a member was lost between two steps")
            self._group = []

    def _notice(self, reason: str) -> None:
        """The first sign that a standing group must change; a loss that led to it says more than `reason`."""
        if self._change is None and self._group:
            noticed_at, why = self._roster.losses[0] if self._roster.losses else (time.monotonic(), reason)
            self._change = _Change(why, len(self._group), noticed_at)


class GangAdapter:
    """A `ModelAdapter` whose velocity runs on a gang; everything else stays with `inner`, in this process."""

    def __init__(self, inner: ModelAdapter, gang: Gang) -> None:
        self._inner, self._gang = inner, gang
        self.name, self.base_id = inner.name, inner.base_id
        self.transformer, self.lora_targets = inner.transformer, inner.lora_targets

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """See `ModelAdapter`."""
        return self._inner.latent_shape(height, width)

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """See `ModelAdapter`."""
        return self._inner.encode(prompts)

    def decode(self, latents: Tensor) -> Tensor:
        """See `ModelAdapter`."""
        return self._inner.decode(latents)

    def velocity(
        self,
        latents: Tensor,
        t: Tensor,
        cond: Conditioning,
        *,
        negative: Conditioning | None = None,
        cfg: float = 1.0,
    ) -> Tensor:
        """See `ModelAdapter` and `Gang.velocity`."""
        texts = None if negative is None else negative.tensors
        v = self._gang.velocity(latents, t, cond.tensors, negative=texts, cfg=cfg)
        return v.to(latents.device)
