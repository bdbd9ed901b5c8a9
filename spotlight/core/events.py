"""What the scheduler hears (events) and what it answers (commands), with their JSON form.

Events that come from a worker carry its epoch or a lease token: whoever holds an old one is answered, and
changes nothing. Commands named in the past tense are facts for the record; Grant, Wake and StopAt ask for
something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from spotlight.core.codec import Codec
from spotlight.core.types import Gpu, Kind, Outcome, Policy, Request, Role

# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Join:
    """A worker starts, or starts again: a new epoch, and all that its name held is taken back."""

    worker: str
    node: str
    role: Role
    members: tuple[Gpu, ...] = ()

    def __post_init__(self) -> None:
        if self.members and self.members[0].node != self.node:
            raise ValueError(f"the leader's GPU must be on {self.node}, not on {self.members[0].node}")


@dataclass(frozen=True, slots=True)
class Admit:
    """A worker has bound a weights version: as many tensors, with this digest."""

    worker: str
    epoch: int
    version: int
    digest: str
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker lives. `beats` lists every lease that it holds, as (token, denoising steps done)."""

    worker: str
    epoch: int
    beats: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """A node is to be taken in `deadline_s` seconds, says `source`. May be false, late or repeated."""

    node: str
    deadline_s: float
    source: str


@dataclass(frozen=True, slots=True)
class WithdrawNotice:
    """The notice was taken back."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone. `preempted`: its provider took it. Otherwise what it was making may be to blame."""

    node: str
    reason: str
    preempted: bool = True


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's process ended. Its node may live on."""

    worker: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Submit:
    """New finals or evals. A request that is known already is left as it is."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give up all unfinished requests of a kind and iteration."""

    kind: Kind
    iteration: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker is free for up to `max_requests` that share a batch. It waits until granted, woken or gone."""

    worker: str
    epoch: int
    max_requests: int = 1


@dataclass(frozen=True, slots=True)
class EndPull:
    """A worker no longer waits."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A lease is `step` denoising steps in. With a digest: the state at that step is at hand to be kept."""

    token: int
    step: int
    digest: str | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """A lease's request is finished and its artifact stored."""

    token: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Fail:
    """A worker could not make a request and lives on."""

    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """A worker hands a lease back, its last state saved: no fault of the request."""

    token: int


@dataclass(frozen=True, slots=True)
class Publish:
    """New weights are current from now on."""

    version: int
    digest: str
    num_tensors: int


@dataclass(frozen=True, slots=True)
class OpenDrafts:
    """Idle spot workers may draft for `iteration` from now on, in the draft source's order."""

    iteration: int
    batch_key: str
    num_steps: int
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CloseDrafts:
    """Drafting ends: outstanding drafts are cancelled."""

    reason: str = "drafts closed"


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over: whatever is unfinished is cancelled, nothing is granted any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. `gap_s`: since the last tick; a long one means that the coordinator itself stood still."""

    gap_s: float


# -------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker is known under this epoch; `version` is current (None: nothing published yet)."""

    worker: str
    epoch: int
    version: int | None
    cooling_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The worker may serve with this version."""

    worker: str
    version: int


@dataclass(frozen=True, slots=True)
class AdmissionRefused:
    """The weights that the worker bound are not what was published."""

    worker: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The worker holds the request under `token`, to be made with `version`, from `resume_step` on.

    Grants with the same `batch` (the first one's token) were made together and start at the same step.
    """

    worker: str
    epoch: int
    token: int
    batch: int
    request: Request
    version: int
    resume_step: int = 0
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Wake:
    """Answer the pull of the worker in that epoch with nothing: weights to admit, or the epoch has passed."""

    worker: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Renewed:
    """The answer to a heartbeat: leases it must drop, and steps to stop, save and release at, by token."""

    worker: str
    epoch: int
    cancelled: tuple[int, ...] = ()
    stop_at: tuple[tuple[int, int], ...] = ()
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class Progressed:
    """The answer to Progress: whether the state is to be kept, and where to stop."""

    token: int
    request: str
    step: int
    saved: bool
    stop_at: int | None = None


@dataclass(frozen=True, slots=True)
class StateDropped:
    """A saved state is of no more use: its weights are too old, or it failed."""

    request: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopAt:
    """The worker is to stop the lease after `step` steps, save its state and release it."""

    worker: str
    token: int
    step: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The commit counts; `again`: it was counted before, the answer had been lost."""

    token: int
    request: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The token has passed, or the outcome is not what was asked for; nothing was changed."""

    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """A lease ended without a commit; the request goes on from `resume_step`, if it goes on."""

    token: int
    worker: str
    request: str
    reason: str
    resume_step: int = 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request ends here."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The node gets no new work; `deadline_s` seconds are left."""

    node: str
    deadline_s: float
    source: str


@dataclass(frozen=True, slots=True)
class InService:
    """The node, or a worker that cooled down, gets work again."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class LostWorker:
    """The worker is gone and its epoch has passed."""

    worker: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class LostNode:
    """None of the node's workers is left."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """The version is current."""

    version: int


@dataclass(frozen=True, slots=True)
class Ignored:
    """The event came too late, twice or for someone unknown, and changed nothing.

    `request`: the one of a Submit that was turned away, if that is what it is about.
    """

    reason: str
    request: str | None = None


@dataclass(frozen=True, slots=True)
class Paused:
    """The coordinator stood still for so long; no worker is held to have been silent meanwhile."""

    gap_s: float


Event = (
    Join | Admit | Heartbeat | Notice | WithdrawNotice | NodeLost | WorkerLost | Submit | Cancel | Pull
    | EndPull | Progress | Commit | Fail | Release | Publish | OpenDrafts | CloseDrafts | Stop | Tick
)  # fmt: skip
Command = (
    Joined | Admitted | AdmissionRefused | Grant | Wake | Renewed | Progressed | StateDropped | StopAt
    | Accepted | Refused | Revoked | Cancelled | Draining | InService | LostWorker | LostNode | Published
    | Ignored | Paused
)  # fmt: skip

EVENTS: tuple[type, ...] = get_args(Event)
COMMANDS: tuple[type, ...] = get_args(Command)
_CODEC = Codec(*EVENTS, *COMMANDS, Request, Outcome, Policy)
encode = _CODEC.encode
decode = _CODEC.decode
