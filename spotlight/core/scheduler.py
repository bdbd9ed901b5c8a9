"""The one decision object: who makes which sample, when, and whose result counts.

Invariants (each has a test of the same name, and `spotlight.core.history` checks each over any run's
journal):

INV-1 one fate.           Every dispatched request ends exactly once: committed, or cancelled with a reason.
INV-2 one commit.         A SampleId enters training at most once, whatever is retried, duplicated or late.
INV-3 fenced.             A worker whose lease token or epoch has passed can change nothing.
INV-4 same samples.       Faults change when and where a sample is made, never which: a grant carries the
                          request as it was submitted, a state goes on only under the weights that began it.
INV-5 bounded staleness.  A final or eval is made with exactly the current version, a draft with one at most
                          `max_draft_lag` old, and by a worker that has admitted that version.

A request:

    submitted -> pending --Grant(token)--> leased --Commit--> committed
                    ^                        |
                    +----Revoked(reason)-----+
                 pending or leased --Cancel, poison, run over--> cancelled

A token is given once and only rises. A lease ends by commit, or is revoked: worker lost or hung, handed
back after a notice, failed, weights too old, another run of the request was first. While a request is the
straggler of a roll-out it may hold two leases; the first commit wins.

`on(event, now)` is deterministic: no clock, no I/O, no randomness. A Tick that returns no command leaves no
trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotlight.core import events as ev
from spotlight.core.attendance import Attendance, advance
from spotlight.core.membership import Lease
from spotlight.core.pending import Record
from spotlight.core.types import Outcome, SavedState, WeightVersion


class Scheduler(Attendance):
    """All state of the run's work. Drive it from one thread, with `now` of one monotonic clock."""

    def on(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Take one event at time `now` (seconds, never falling) and say what is to be done."""
        self.now = max(self.now, now)
        out: list[ev.Command] = []
        self.out = out
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

    # ------------------------------------------------------------------------------------ requests

    def _submit(self, event: ev.Submit) -> None:
        for request in event.requests:
            if request.kind == "draft":
                self.out.append(ev.Ignored("drafts come from the draft source", request.id))
            elif request.id in self.records:
                self.out.append(ev.Ignored(f"{request.id} is known"))
            elif request.sample.iteration < self.oldest_iteration:
                self.out.append(ev.Ignored("its iteration is long over", request.id))
            else:
                self._enter(Record(request, request.id))
        self.offer_parked()

    def _enter(self, record: Record) -> None:
        self.records[record.id] = record
        if self.stopped is not None:
            self.cancel(record, self.stopped)
        else:
            self.newest_iteration = max(self.newest_iteration, record.request.sample.iteration)
            self.queue_of(record).push(record)

    def _cancel(self, event: ev.Cancel) -> None:
        if event.kind == "draft" and self.drafting and self.drafting.iteration == event.iteration:
            self.close_drafts(event.reason)  # the source would only offer them again
        for record in list(self.records.values()):
            request = record.request
            if (
                record.fate is None
                and request.kind == event.kind
                and request.sample.iteration == event.iteration
            ):
                self.cancel(record, event.reason)

    def _pull(self, event: ev.Pull) -> None:
        worker = self.heard(event.worker, event.epoch)
        if worker is None:
            return
        self.parked[worker.name] = max(event.max_requests, 1)
        if self.stopped is not None:
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
        advance(lease, event.step, self.now)
        record = self.records[lease.request.id]
        state = record.state
        saved = event.digest is not None and (
            state is None or state.version != lease.version or state.step < event.step
        )
        if saved:
            record.state = SavedState(event.step, lease.version, event.digest or "", event.num_bytes)
        self.out.append(ev.Progressed(event.token, record.id, event.step, saved, lease.stop_at))

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
        """A commit's answer may have been lost: the winner asking again is told so, all others are fenced."""
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

    # ------------------------------------------------------------------------------------ phases

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
        if self.stopped is not None or event.iteration < self.oldest_iteration:
            self.out.append(ev.Ignored("drafts: the run or their iteration is over"))
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


def _mismatch(lease: Lease, outcome: Outcome) -> str | None:
    """What is wrong with an outcome of this lease."""
    request = lease.request
    if (outcome.kind, outcome.sample) != (request.kind, request.sample):
        return f"the token is for {request.id}, the outcome for {outcome.kind}/{outcome.sample}"
    if outcome.version != lease.version:
        return f"made with version {outcome.version}, granted for {lease.version}"
    if outcome.worker != lease.worker.name:
        return f"the token is {lease.worker.name}'s, not {outcome.worker}'s"
    return None


_HANDLERS: dict[type, Callable[[Scheduler, Any], None]] = {
    ev.Join: Scheduler.join,
    ev.Admit: Scheduler.admit,
    ev.Heartbeat: Scheduler.heartbeat,
    ev.Notice: Scheduler.notice,
    ev.WithdrawNotice: Scheduler.withdraw_notice,
    ev.NodeLost: Scheduler.node_lost,
    ev.WorkerLost: Scheduler.worker_lost,
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
    ev.Tick: Scheduler.tick,
}
