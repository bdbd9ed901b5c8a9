"""The nouns that the scheduler, the runtime, the simulator and the journal share.

All are frozen values. Times are seconds of the coordinator's monotonic clock unless the name says `utc`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Kind = Literal["final", "eval", "draft"]
Role = Literal["on_demand", "spot"]

_SAMPLE_ID = re.compile(r"it(0|[1-9][0-9]{0,17})/row(0|[1-9][0-9]{0,17})/s(0|[1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class SampleId:
    """Which sample: iteration, dataset row, seed. Written "it12/row34/s5"; all noise follows from it."""

    iteration: int
    row: int
    seed: int

    def __str__(self) -> str:
        return f"it{self.iteration}/row{self.row}/s{self.seed}"

    @classmethod
    def parse(cls, text: str) -> SampleId:
        """The inverse of `str`. Raises ValueError on anything that `str` does not produce."""
        match = _SAMPLE_ID.fullmatch(text)
        if not match:
            raise ValueError(f"not a sample id: {text[:60]!r}")
        return cls(*map(int, match.groups()))


@dataclass(frozen=True, slots=True)
class Request:
    """One image to make.

    Only requests with equal `batch_key` (sampler and size) may share a forward pass. Which weights it needs
    follows from the kind: a final or an eval the current version, a draft one at most `max_draft_lag` old.
    """

    kind: Kind
    sample: SampleId
    batch_key: str
    num_steps: int

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")

    @property
    def id(self) -> str:
        """The name of the request: a draft and its final share the sample but not the request."""
        return f"{self.kind}/{self.sample}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker reports for one finished request; the images themselves lie in the artifact store.

    reward None: scoring failed (never 0, never averaged). cost_s: the request's share of the worker's time,
    so that the shares of a batch add up to its wall time. num_steps: denoising steps done here, after
    `resumed_from`.
    """

    sample: SampleId
    kind: Kind
    version: int
    reward: float | None
    digest: str
    worker: str
    cost_s: float
    num_steps: int
    resumed_from: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite or None, got {self.reward}")
        if not (math.isfinite(self.cost_s) and self.cost_s >= 0):
            raise ValueError(f"cost_s must be finite and not negative, got {self.cost_s}")
        if self.num_steps < 0 or self.resumed_from < 0:
            raise ValueError("num_steps and resumed_from must not be negative")


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published set of weights: its number, the digest of its tensors and how many there are."""

    n: int
    digest: str
    num_tensors: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """A denoising state, `step` steps done with weights `version`; its bytes lie with the coordinator."""

    step: int
    version: int
    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a node."""

    node: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """The GPUs that serve one request together; the first one leads, pulls and speaks as the worker."""

    members: tuple[Gpu, ...]
    epoch: int

    @property
    def degree(self) -> int:
        """The sequence-parallel degree."""
        return len(self.members)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes it stands on, the leader's first, each once."""
        return tuple(dict.fromkeys(gpu.node for gpu in self.members))


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduler's dials."""

    dead_after_s: float = 3.0
    """A worker unheard of for so long is lost; workers renew three times as often."""
    stall_after_s: float = 120.0
    """A lease without a denoising step for so long takes its worker for hung."""
    quiet_s: float = 30.0
    """A node that lives on so long past its notice's deadline returns to service."""
    notice_margin_s: float = 5.0
    """On a notice, what should end this long before the deadline may finish; the rest stops and moves."""
    max_deaths: int = 3
    """A request that took so many workers with it, or failed so often, is cancelled as poison."""
    max_draft_lag: int = 1
    """How many versions behind the current one a draft may be."""
    flap_life_s: float = 60.0
    """A worker that lived shorter than this flapped."""
    flap_backoff_s: float = 5.0
    """Wait before a worker serves after its second flap in a row; doubles with each further one."""
    flap_backoff_max_s: float = 300.0
    """The longest such wait."""
    duplicate_factor: float = 1.5
    """A straggler is duplicated where a second run would end this many times sooner."""
    keep_iterations: int = 2
    """Fates of so many past iterations are remembered; older submissions are refused."""

    def __post_init__(self) -> None:
        if self.dead_after_s <= 0 or self.stall_after_s <= 0:
            raise ValueError("dead_after_s and stall_after_s must be positive")
        if self.max_deaths < 1 or self.max_draft_lag < 0 or self.keep_iterations < 1:
            raise ValueError("max_deaths and keep_iterations must be at least 1, max_draft_lag at least 0")


class DraftSource(Protocol):
    """Who says which seeds to draft next: the exploration planner. Called only from within `Scheduler.on`."""

    def next_drafts(self, max_requests: int, now: float) -> list[tuple[int, int]]:
        """Up to so many (row, seed), best first; empty when there is nothing worth drafting now."""
        ...

    def draft_done(self, row: int, seed: int, reward: float | None, cost_s: float, now: float) -> None:
        """A draft came back; None: it failed for good or could not be scored."""
        ...

    def draft_returned(self, row: int, seed: int) -> None:
        """A draft was lost on the way or cancelled: it was not made and may be handed out again."""
        ...
