"""Who comes and goes: the event handlers about workers and nodes, and the passing of time."""

from __future__ import annotations

from spotlight.core import events as ev
from spotlight.core.dispatch import Dispatch
from spotlight.core.membership import Lease, Node, Worker
from spotlight.core.types import Gpu, Group


class Attendance(Dispatch):
    """The part of the scheduler that knows who may work."""

    def join(self, event: ev.Join) -> None:
        """A worker under a new epoch; what its name held before is taken back."""
        if before := self.members.workers.get(event.worker):
            self._lose(before, "joined again", blame=True)
        members = event.members or (Gpu(event.node),)
        group = Group(members, self.members.next_epoch())
        worker = self.members.join(event.worker, event.role, group, self.now)
        current = self.members.current
        cooling_s = (worker.cooling_until or self.now) - self.now
        self.out.append(ev.Joined(worker.name, worker.epoch, current.n if current else None, cooling_s))

    def admit(self, event: ev.Admit) -> None:
        """Let a worker serve with what it bound, if that is what was published."""
        worker = self.heard(event.worker, event.epoch)
        if worker is None:
            return
        weights = self.published.get(event.version)
        problem = None
        if weights is None:
            problem = "this version is not published, or too old"
        elif event.num_tensors != weights.num_tensors:
            problem = f"{event.num_tensors} of {weights.num_tensors} tensors bound"
        elif event.digest != weights.digest:
            problem = "digest differs"
        elif worker.version is not None and worker.version > event.version:
            problem = f"version {worker.version} was admitted before"
        if problem:
            self.out.append(ev.AdmissionRefused(worker.name, event.version, problem))
            return
        worker.version = event.version
        self.members.refresh(worker)
        self.out.append(ev.Admitted(worker.name, event.version))
        self.offer_parked()

    def heartbeat(self, event: ev.Heartbeat) -> None:
        """Renew a worker, and tell it what to drop and where to stop."""
        worker = self.members.holder(event.worker, event.epoch)
        if worker is None:
            tokens = tuple(token for token, _ in event.beats)
            self.out.append(ev.Renewed(event.worker, event.epoch, tokens, fenced=True))
            return
        worker.last_seen = self.now
        cancelled, stop_at = [], []
        for token, step in event.beats:
            lease = worker.leases.get(token)
            if lease is None:
                cancelled.append(token)
                continue
            lease.held_at = self.now
            advance(lease, step, self.now)
            if lease.stop_at is not None:
                stop_at.append((token, lease.stop_at))
        if len(worker.leases) + len(cancelled) > len(event.beats):
            self._take_back_unheld(worker, {token for token, _ in event.beats})
        self.out.append(ev.Renewed(worker.name, worker.epoch, tuple(cancelled), tuple(stop_at)))

    def _take_back_unheld(self, worker: Worker, held: set[int]) -> None:
        """A grant that got lost on its way is held by nobody: after a while, give it to another."""
        unheld = [lease for token, lease in worker.leases.items() if token not in held]
        lost = [lease for lease in unheld if self.now - lease.held_at > self.policy.dead_after_s]
        for lease in lost:
            self.revoke(lease, "not held by its worker")
        if lost:
            self.offer_parked()

    def notice(self, event: ev.Notice) -> None:
        """Take a node out of service and have its work moved."""
        node = self.members.nodes.get(event.node)
        deadline = self.now + max(event.deadline_s, 0.0)
        if node is None or (node.deadline is not None and node.deadline <= deadline):
            self.out.append(ev.Ignored(f"notice for {event.node}: " + ("known" if node else "no such node")))
            return
        self.members.drain(node, deadline)
        self.out.append(ev.Draining(node.name, max(event.deadline_s, 0.0), event.source))
        for worker in node.workers.values():
            self._stop_leases(worker, deadline)
            if worker.name in self.parked:
                self.wake(worker, "draining")
        self.offer_parked()  # what was to be done sooner there may be better done here now

    def _stop_leases(self, worker: Worker, deadline: float) -> None:
        """Let what ends well before the deadline finish; every other batch stops at one agreed step."""
        furthest: dict[int, int] = {}
        for lease in worker.leases.values():
            furthest[lease.batch] = max(furthest.get(lease.batch, 0), lease.step)
        for lease in worker.leases.values():
            left_s, step = self.left_s(lease), furthest[lease.batch] + 1
            in_time = left_s is not None and self.now + left_s + self.policy.notice_margin_s <= deadline
            if not in_time and step < lease.request.num_steps:
                lease.stop_at = step
                self.out.append(ev.StopAt(worker.name, lease.token, step))

    def withdraw_notice(self, event: ev.WithdrawNotice) -> None:
        """Take it back into service."""
        node = self.members.nodes.get(event.node)
        if node is None or node.deadline is None:
            self.out.append(ev.Ignored(f"no notice stands for {event.node}"))
            return
        self.members.undrain(node)
        self._back_in_service(node, "notice withdrawn")
        self.offer_parked()

    def _back_in_service(self, node: Node, reason: str) -> None:
        self.out.append(ev.InService(node.name, reason))
        for worker in node.workers.values():
            for lease in worker.leases.values():
                lease.stop_at = None

    def node_lost(self, event: ev.NodeLost) -> None:
        """Lose all workers that stand on the node."""
        node = self.members.nodes.get(event.node)
        if node is None:
            self.out.append(ev.Ignored(f"no such node: {event.node}"))
            return
        for worker in list(node.workers.values()):
            self._lose(worker, event.reason, blame=not event.preempted)
        self.offer_parked()

    def worker_lost(self, event: ev.WorkerLost) -> None:
        """Lose one."""
        worker = self.members.holder(event.worker, event.epoch)
        if worker is None:
            self.out.append(ev.Ignored(f"no such worker and epoch: {event.worker} {event.epoch}"))
            return
        self._lose(worker, event.reason, blame=True)
        self.offer_parked()

    def _lose(self, worker: Worker, reason: str, *, blame: bool) -> None:
        """Take all back. `blame`: what it was making may have killed it, unless its node had a notice."""
        expected = any(self.members.nodes[node].deadline is not None for node in worker.group.nodes)
        leases = list(worker.leases.values())
        self.parked.pop(worker.name, None)
        empty = self.members.lose(worker, self.now)
        self.out.append(ev.LostWorker(worker.name, worker.epoch, reason))
        self.out.extend(ev.LostNode(node, reason) for node in empty)
        for lease in leases:
            self.revoke(lease, f"worker lost: {reason}", deaths=int(blame and not expected))

    def heard(self, name: str, epoch: int) -> Worker | None:
        """The live worker that speaks, and so shows that it lives. Anyone else is told that it is fenced."""
        worker = self.members.holder(name, epoch)
        if worker is None:
            self.out.append(ev.Wake(name, epoch, "fenced"))
        else:
            worker.last_seen = self.now
        return worker

    def tick(self, event: ev.Tick) -> None:
        """Find who is silent, hung, cooled down or back in service."""
        members = self.members
        if event.gap_s > self.policy.dead_after_s:
            members.pause(self.now)
            self.out.append(ev.Paused(event.gap_s))
        for worker in members.silent(self.now):
            self._lose(worker, "silent", blame=True)
        for worker in members.stalled(self.now):
            self._lose(worker, "no denoising step", blame=True)
        for worker in members.cooled(self.now):
            self.out.append(ev.InService(worker.name, "cooled down"))
        for node in members.quiet(self.now):
            self._back_in_service(node, "outlived its notice")
        self.offer_parked(drafts=False)  # no draft becomes worth while by waiting


def advance(lease: Lease, step: int, now: float) -> None:
    """Note that a lease has come so far; a late report changes nothing."""
    if lease.step < step <= lease.request.num_steps:
        lease.step = step
        lease.progress_at = now
