"""The one decision object: who makes which sample, when, and whose result counts.

Invariants (each has a test of the same name, and `spotlight.core.history` checks each over any run's journal):

INV-1 one fate.           Every dispatched request ends exactly once: committed, or cancelled with a reason.
INV-2 one commit.         A SampleId enters training at most once, whatever is retried, duplicated or late.
INV-3 fenced.             A worker whose lease token or epoch has passed can change nothing.
INV-4 same samples.       Faults change when and where a sample is made, never which: a grant carries the request
                          as it was submitted, and a state goes on only under the weights that began it.
INV-5 bounded staleness.  A final or eval is made with exactly the current version, a draft with one at most
                          `max_draft_lag` old, and by a worker that has admitted that version.

A request:

    submitted -> pending --Grant(token)--> leased --Commit--> committed
                    ^                        |
                    +-- Revoked(reason) -----+        pending or leased --Cancel, poison, run over--> cancelled

A token is given once and only rises. A lease ends by commit, or is revoked: worker lost or hung, handed back after a
notice, failed, weights too old, another run of the request was first. While a request is the straggler of a roll-out
it may hold two leases; the first commit wins.

`on(event, now)` is deterministic: no clock, no I/O, no randomness. A Tick that returns no command leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from spotlight.core import events as ev
from spotlight.core.dispatch import Dispatch
from spotlight.core.membership import Lease, Node, Worker
from spotlight.core.pending import Record
from spotlight.core.types import Group, Gpu, Outcome, SavedState, WeightVersion


class Scheduler(Dispatch):
    """All state of the run's work. Drive it from one thread, with `now` of one monotonic clock."""

    def on(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Take one event at time `now` (seconds, never falling) and say what is to be done."""
        self.now = max(self.now, now)
        self.out = out = []
        _HANDLERS[type(event)](self, event)
        return out

    def snapshot(self) -> dict[str, Any]:
        """Counts and members as plain JSON, for the status."""
        return {
            "version": self.members.current.n if self.members.current else None,
            "pending": {"final": len(self.finals), "eval": len(self.evals)},
            "leased": len(self.leases),
            "waiting": len(self.parked),
            "drafting": self.drafting.iteration if self.drafting else None,
            "nodes": {
                name: {"draining": node.deadline is not None, "workers": sorted(node.workers)}
                for name, node in sorted(self.members.nodes.items())
            },
            "workers": {
                name: {
                    "role": worker.role,
                    "epoch": worker.epoch,
                    "degree": worker.group.degree,
                    "version": worker.version,
                    "serving": self.members.serving(worker),
                    "silent_s": round(self.now - worker.last_seen, 3),
                    "leases": {lease.request.id: lease.step for lease in worker.leases.values()},
                }
                for name, worker in sorted(self.members.workers.items())
            },
        }

    # ------------------------------------------------------------------------------------ members

    def _join(self, event: ev.Join) -> None:
        if before := self.members.workers.get(event.worker):
            self._lose(before, "joined again", blame=True)
        members = event.members or (Gpu(event.node),)
        group = Group(members, self.members.next_epoch())
        worker = self.members.join(event.worker, event.role, group, self.now)
        current = self.members.current
        cooling_s = (worker.cooling_until or self.now) - self.now
        self.out.append(ev.Joined(worker.name, worker.epoch, current.n if current else None, cooling_s))

    def _admit(self, event: ev.Admit) -> None:
        worker = self._heard(event.worker, event.epoch)
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

    def _heartbeat(self, event: ev.Heartbeat) -> None:
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
            lease.acknowledged = True
            self._advance(lease, step)
            if lease.stop_at is not None:
                stop_at.append((token, lease.stop_at))
        if len(worker.leases) + len(cancelled) > len(event.beats):
            self._take_back_unheld(worker, {token for token, _ in event.beats})
        self.out.append(ev.Renewed(worker.name, worker.epoch, tuple(cancelled), tuple(stop_at)))

    def _take_back_unheld(self, worker: Worker, held: set[int]) -> None:
        """A grant whose answer was lost on the way is never held by anyone: after a while, give it to another."""
        patience_s = self.policy.dead_after_s
        for lease in [lease for token, lease in worker.leases.items() if token not in held]:
            if lease.acknowledged or self.now - lease.granted_at > patience_s:
                self.revoke(lease, "not held by its worker")
        self.offer_parked()

    def _notice(self, event: ev.Notice) -> None:
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

    def _stop_leases(self, worker: Worker, deadline: float) -> None:
        """Let what ends well before the deadline finish; each other batch stops at one agreed step."""
        furthest: dict[int, int] = {}
        for lease in worker.leases.values():
            furthest[lease.batch] = max(furthest.get(lease.batch, 0), lease.step)
        for lease in worker.leases.values():
            left_s = self.left_s(lease)
            if left_s is not None and self.now + left_s + self.policy.notice_margin_s <= deadline:
                continue
            lease.stop_at = min(furthest[lease.batch] + 1, lease.request.num_steps)
            self.out.append(ev.StopAt(worker.name, lease.token, lease.stop_at))

    def _withdraw_notice(self, event: ev.WithdrawNotice) -> None:
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

    def _node_lost(self, event: ev.NodeLost) -> None:
        node = self.members.nodes.get(event.node)
        if node is None:
            self.out.append(ev.Ignored(f"no such node: {event.node}"))
            return
        for worker in list(node.workers.values()):
            self._lose(worker, event.reason, blame=not event.preempted)
        self.offer_parked()

    def _worker_lost(self, event: ev.WorkerLost) -> None:
        worker = self.members.holder(event.worker, event.epoch)
        if worker is None:
            self.out.append(ev.Ignored(f"no such worker and epoch: {event.worker} {event.epoch}"))
            return
        self._lose(worker, event.reason, blame=True)
        self.offer_parked()

    def _lose(self, worker: Worker, reason: str, *, blame: bool) -> None:
        """Take everything back. `blame`: what it was making may be what killed it, unless its node had a notice."""
        expected = any(self.members.nodes[node].deadline is not None for node in worker.group.nodes)
        leases = list(worker.leases.values())
        self.parked.pop(worker.name, None)
        empty = self.members.lose(worker, self.now)
        self.out.append(ev.LostWorker(worker.name, worker.epoch, reason))
        self.out.extend(ev.LostNode(node, reason) for node in empty)
        for lease in leases:
            self.revoke(lease, f"worker lost: {reason}", deaths=int(blame and not expected))

    def _heard(self, name: str, epoch: int) -> Worker | None:
        """The live worker that speaks; its word counts as a sign of life. Anyone else is told that it is fenced."""
        worker = self.members.holder(name, epoch)
        if worker is None:
            self.out.append(ev.Wake(name, "fenced"))
        else:
            worker.last_seen = self.now
        return worker

    # ------------------------------------------------------------------------------------ requests

    def _submit(self, event: ev.Submit) -> None:
        for request in event.requests:
            if request.kind == "draft":
                self.out.append(ev.Ignored(f"{request.id}: drafts come from the draft source"))
            elif request.id in self.records:
                self.out.append(ev.Ignored(f"{request.id} is known"))
            else:
                record = self.records[request.id] = Record(request, request.id)
                if self.stopped:
                    self.cancel(record, self.stopped)
                elif request.sample.iteration < self.oldest_iteration:
                    self.cancel(record, "its iteration is long over")
                else:
                    self.newest_iteration = max(self.newest_iteration, request.sample.iteration)
                    self.queue_of(record).push(record)
        self.offer_parked()

    def _cancel(self, event: ev.Cancel) -> None:
        for record in list(self.records.values()):
            request = record.request
            if (
                record.fate is None
                and request.kind == event.kind
                and request.sample.iteration == event.iteration
            ):
                self.cancel(record, event.reason)

    def _pull(self, event: ev.Pull) -> None:
        worker = self._heard(event.worker, event.epoch)
        if worker is None:
            return
        self.parked[worker.name] = max(event.max_requests, 1)
        if self.stopped:
            self.wake(worker, "stopped")
        else:
            self.offer(worker)

    def _end_pull(self, event: ev.EndPull) -> None:
        if self.members.holder(event.worker, event.epoch):
            self.parked.pop(event.worker, None)

    def _progress(self, event: ev.Progress) -> None:
        lease = self.leases.get(event.token)
        if lease is None:
            self.out.append(ev.Refused(event.token, "fenced"))
            return
        if not 0 <= event.step <= lease.request.num_steps:
            self.out.append(ev.Refused(event.token, f"no step {event.step} in {lease.request.num_steps}"))
            return
        lease.worker.last_seen = self.now
        self._advance(lease, event.step)
        record = self.records[lease.request.id]
        state = record.state
        saved = event.digest is not None and (
            state is None or state.version != lease.version or state.step < event.step
        )
        if saved:
            record.state = SavedState(event.step, lease.version, event.digest or "", event.num_bytes)
        self.out.append(ev.Progressed(event.token, record.id, event.step, saved, lease.stop_at))

    def _advance(self, lease: Lease, step: int) -> None:
        if lease.step < step <= lease.request.num_steps:
            lease.step = step
            lease.progress_at = self.now

    def _commit(self, event: ev.Commit) -> None:
        lease = self.leases.get(event.token)
        if lease is None:
            self._commit_without_lease(event)
            return
        lease.worker.last_seen = self.now
        if problem := _mismatch(lease, event.outcome):
            self.out.append(ev.Refused(event.token, problem))
            return
        record = self.records[lease.request.id]
        record.fate = event.token
        self.end(lease)
        self.out.append(ev.Accepted(event.token, record.id))
        for token in list(record.tokens):
            self.revoke(self.leases[token], "another run was first")
        self._learn(lease, event.outcome)

    def _commit_without_lease(self, event: ev.Commit) -> None:
        """The answer to a commit may have been lost: the winner's own retry is told so, all others are fenced."""
        record = self.records.get(f"{event.outcome.kind}/{event.outcome.sample}")
        if record is not None and record.fate == event.token:
            self.out.append(ev.Accepted(event.token, record.id, again=True))
        elif record is not None and record.fate is not None:
            fate = "committed by another run" if isinstance(record.fate, int) else f"cancelled: {record.fate}"
            self.out.append(ev.Refused(event.token, f"fenced: {fate}"))
        else:
            self.out.append(ev.Refused(event.token, "fenced"))

    def _learn(self, lease: Lease, outcome: Outcome) -> None:
        worker, request = lease.worker, lease.request
        self.costs.observe(worker.name, request.batch_key, outcome.cost_s / max(outcome.num_steps, 1))
        if request.kind == "draft" and self.drafts:
            sample = request.sample
            self.drafts.draft_done(sample.row, sample.seed, outcome.reward, outcome.cost_s, self.now)
            self.offer_parked()

    def _fail(self, event: ev.Fail) -> None:
        lease = self.leases.get(event.token)
        if lease is None:
            self.out.append(ev.Refused(event.token, "fenced"))
            return
        lease.worker.last_seen = self.now
        self.drop_state(self.records[lease.request.id], "the request failed from it")
        self.revoke(lease, f"failed: {event.reason}", deaths=1)
        self.offer_parked()

    def _release(self, event: ev.Release) -> None:
        lease = self.leases.get(event.token)
        if lease is None:
            self.out.append(ev.Refused(event.token, "fenced"))
            return
        lease.worker.last_seen = self.now
        self.revoke(lease, "handed back")
        self.offer_parked()

    # ------------------------------------------------------------------------------------ phases, time

    def _publish(self, event: ev.Publish) -> None:
        current = self.members.current
        if current is not None and event.version <= current.n:
            self.out.append(ev.Ignored(f"version {event.version} is not newer than {current.n}"))
            return
        weights = WeightVersion(event.version, event.digest, event.num_tensors)
        self.members.publish(weights)
        self.published[event.version] = weights
        oldest = event.version - self.policy.max_draft_lag
        self.published = {n: kept for n, kept in self.published.items() if n >= oldest}
        self.out.append(ev.Published(event.version))
        self.drop_stale()
        self.forget_old_iterations()
        for name in list(self.parked):
            self.wake(self.members.workers[name], "new weights")

    def _open_drafts(self, event: ev.OpenDrafts) -> None:
        self.close_drafts("drafts opened anew")
        if self.stopped or event.iteration < self.oldest_iteration:
            self.out.append(ev.Ignored(self.stopped or "its iteration is long over"))
            return
        self.drafting = event
        self.newest_iteration = max(self.newest_iteration, event.iteration)
        self.offer_parked()

    def _close_drafts(self, event: ev.CloseDrafts) -> None:
        self.close_drafts(event.reason)

    def _stop(self, event: ev.Stop) -> None:
        self.stopped = event.reason
        self.close_drafts(event.reason)
        for record in [record for record in self.records.values() if record.fate is None]:
            self.cancel(record, event.reason)
        for name in list(self.parked):
            self.wake(self.members.workers[name], "stopped")

    def _tick(self, event: ev.Tick) -> None:
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
        if self.parked:
            self.offer_parked()


def _mismatch(lease: Lease, outcome: Outcome) -> str | None:
    """What is wrong with an outcome of this lease."""
    request = lease.request
    if (outcome.kind, outcome.sample) != (request.kind, request.sample):
        return f"the token is for {request.id}, the outcome for {outcome.kind}/{outcome.sample}"
    if outcome.version != lease.version:
        return f"made with version {outcome.version}, granted for {lease.version}"
    if outcome.worker != lease.worker.name:
        return f"the token is {lease.worker.name}'s, not {outcome.worker}'s"
    if not math.isfinite(outcome.cost_s):
        return "cost_s is not finite"
    return None


_HANDLERS: dict[type, Callable[[Scheduler, Any], None]] = {
    ev.Join: Scheduler._join,
    ev.Admit: Scheduler._admit,
    ev.Heartbeat: Scheduler._heartbeat,
    ev.Notice: Scheduler._notice,
    ev.WithdrawNotice: Scheduler._withdraw_notice,
    ev.NodeLost: Scheduler._node_lost,
    ev.WorkerLost: Scheduler._worker_lost,
    ev.Submit: Scheduler._submit,
    ev.Cancel: Scheduler._cancel,
    ev.Pull: Scheduler._pull,
    ev.EndPull: Scheduler._end_pull,
    ev.Progress: Scheduler._progress,
    ev.Commit: Scheduler._commit,
    ev.Fail: Scheduler._fail,
    ev.Release: Scheduler._release,
    ev.Publish: Scheduler._publish,
    ev.OpenDrafts: Scheduler._open_drafts,
    ev.CloseDrafts: Scheduler._close_drafts,
    ev.Stop: Scheduler._stop,
    ev.Tick: Scheduler._tick,
}
