"""Who is there: nodes, their workers, epochs, weights, notices and flapping.

    worker   joined --admits weights--> serving <--> cooling (flapped) | draining (its node has a notice)
             any --silent, hung, process ended, node lost, joined again--> lost: its epoch has passed for good
    node     in service --notice--> draining --quiet period after the deadline, or withdrawn--> in service
             any --its last worker lost--> forgotten

A worker's name outlives it; what counts is the pair of name and epoch, and epochs only rise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spotlight.core.balance import FinishBook
from spotlight.core.deadlines import Deadlines
from spotlight.core.types import Group, Policy, Request, Role, WeightVersion


@dataclass(slots=True)
class Lease:
    """A worker's right to commit one request. `step` done of its steps; `stop_at` once it is to move."""

    token: int
    request: Request
    worker: Worker
    version: int
    batch: int
    batch_size: int
    step: int
    progress_at: float
    held_at: float
    """When its worker last said that it holds it."""
    stop_at: int | None = None


@dataclass(slots=True)
class Worker:
    """One incarnation of a worker: the leader of a group of GPUs."""

    name: str
    role: Role
    group: Group
    joined_at: float
    last_seen: float
    version: int | None = None
    cooling_until: float | None = None
    alive: bool = True
    leases: dict[int, Lease] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """The epoch that its calls must carry."""
        return self.group.epoch


@dataclass(slots=True)
class Node:
    """A machine with live workers; `deadline` is set while it drains."""

    name: str
    workers: dict[str, Worker] = field(default_factory=dict)
    deadline: float | None = None


class Membership:
    """Nodes and workers, changed only by the scheduler."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.workers: dict[str, Worker] = {}
        self.nodes: dict[str, Node] = {}
        self.fresh: set[str] = set()
        """Workers that serve with the current version."""
        self.current: WeightVersion | None = None
        self.busy = FinishBook()
        """When each busy worker with a known cost will be free and could have done one request more."""
        self._epoch = 0
        self._listening_since = 0.0
        self._flaps: dict[str, int] = {}
        self._silence = Deadlines()
        self._stalls = Deadlines()
        self._cooling = Deadlines()
        self._notices = Deadlines()

    # -- workers

    def join(self, name: str, role: Role, group: Group, now: float) -> Worker:
        """Enter a worker under a new epoch; one that flaps cools down first."""
        self._epoch = group.epoch
        worker = self.workers[name] = Worker(name, role, group, joined_at=now, last_seen=now)
        for node in group.nodes:
            self.nodes.setdefault(node, Node(node)).workers[name] = worker
        flaps = self._flaps.get(name, 0)
        if flaps > 1:
            wait_s = min(
                self.policy.flap_backoff_s * 2.0 ** min(flaps - 2, 30), self.policy.flap_backoff_max_s
            )
            worker.cooling_until = now + wait_s
            self._cooling.arm(name, worker.cooling_until)
        self._silence.arm(name, now + self.policy.dead_after_s)
        return worker

    def next_epoch(self) -> int:
        """The epoch of the next worker to join."""
        return self._epoch + 1

    def holder(self, name: str, epoch: int) -> Worker | None:
        """The live worker of that name, if it is still in that epoch."""
        worker = self.workers.get(name)
        return worker if worker is not None and worker.group.epoch == epoch else None

    def lose(self, worker: Worker, now: float) -> list[str]:
        """Forget a worker; returns the nodes that have none left, forgotten too."""
        worker.alive = False
        del self.workers[worker.name]
        self.fresh.discard(worker.name)
        self.busy.remove(worker.name)
        short = now - worker.joined_at < self.policy.flap_life_s
        self._flaps[worker.name] = self._flaps.get(worker.name, 0) + 1 if short else 0
        empty = []
        for name in worker.group.nodes:
            node = self.nodes[name]
            del node.workers[worker.name]
            if not node.workers:
                del self.nodes[name]
                empty.append(name)
        return empty

    def refresh(self, worker: Worker) -> None:
        """Keep `fresh` right after a change of the worker."""
        if self.serving(worker) and self.current is not None and worker.version == self.current.n:
            self.fresh.add(worker.name)
        else:
            self.fresh.discard(worker.name)

    def serving(self, worker: Worker) -> bool:
        """Whether it may get work at all: weights admitted, not cooling, no notice on any of its nodes."""
        return (
            worker.version is not None
            and worker.cooling_until is None
            and all(self.nodes[node].deadline is None for node in worker.group.nodes)
        )

    def publish(self, weights: WeightVersion) -> None:
        """Make `weights` current: nobody serves with them yet."""
        self.current = weights
        for worker in self.workers.values():
            self.refresh(worker)

    def watch_stalls(self, worker: Worker, now: float) -> None:
        """From now on the worker must move its leases on."""
        self._stalls.arm(worker.name, now + self.policy.stall_after_s)

    # -- notices

    def drain(self, node: Node, deadline: float) -> None:
        """Take the node out of service until its deadline and a quiet period have passed."""
        node.deadline = deadline
        self._notices.arm(node.name, deadline + self.policy.quiet_s)
        for worker in node.workers.values():
            self.refresh(worker)

    def undrain(self, node: Node) -> None:
        """The notice was false: back to service."""
        node.deadline = None
        for worker in node.workers.values():
            self.refresh(worker)

    # -- time

    def pause(self, now: float) -> None:
        """The coordinator was not listening until now: silence counts from here."""
        self._listening_since = now

    def silent(self, now: float) -> list[Worker]:
        """Workers unheard of for too long."""
        return self._find(self._silence.due(now, self._silence_deadline))

    def stalled(self, now: float) -> list[Worker]:
        """Workers that beat but do not move a lease on."""
        return self._find(self._stalls.due(now, self._stall_deadline))

    def cooled(self, now: float) -> list[Worker]:
        """Workers whose back-off is over, back in service."""
        workers = self._find(self._cooling.due(now, self._cooling_deadline))
        for worker in workers:
            worker.cooling_until = None
            self.refresh(worker)
        return workers

    def quiet(self, now: float) -> list[Node]:
        """Nodes that outlived their notice, back in service."""
        nodes = [self.nodes[name] for name in self._notices.due(now, self._notice_deadline)]
        for node in nodes:
            self.undrain(node)
        return nodes

    def _find(self, names: Iterable[str]) -> list[Worker]:
        return [self.workers[name] for name in names]

    def _silence_deadline(self, name: str) -> float | None:
        worker = self.workers.get(name)
        if worker is None:
            return None
        return max(worker.last_seen, self._listening_since) + self.policy.dead_after_s

    def _stall_deadline(self, name: str) -> float | None:
        worker = self.workers.get(name)
        if worker is None or not worker.leases:
            return None
        slowest = min(lease.progress_at for lease in worker.leases.values())
        return max(slowest, self._listening_since) + self.policy.stall_after_s

    def _cooling_deadline(self, name: str) -> float | None:
        worker = self.workers.get(name)
        return worker.cooling_until if worker else None

    def _notice_deadline(self, name: str) -> float | None:
        node = self.nodes.get(name)
        return node.deadline + self.policy.quiet_s if node and node.deadline is not None else None
