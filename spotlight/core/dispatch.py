"""The work itself: requests, leases, and who gets what next.

Order: finals, evals, a second run for a straggler, drafts. Within finals and evals the longest first;
within drafts those with a saved state, then the draft source's order.
"""

from __future__ import annotations

from typing import NamedTuple

from spotlight.core import events as ev
from spotlight.core.balance import CostModel
from spotlight.core.membership import Lease, Membership, Worker
from spotlight.core.pending import Pending, Record
from spotlight.core.types import DraftSource, Policy, Request, SampleId, WeightVersion


class Straggler(NamedTuple):
    """A request in its only run, by this worker, and the seconds until that should end."""

    record: Record
    worker: Worker
    left_s: float


class Dispatch:
    """State and moves that the scheduler's event handlers are made of; commands gather in `out`."""

    def __init__(
        self, policy: Policy | None = None, drafts: DraftSource | None = None, *, first_token: int = 1
    ) -> None:
        self.policy = policy or Policy()
        self.members = Membership(self.policy)
        self.costs = CostModel()
        self.drafts = drafts
        self.drafting: ev.OpenDrafts | None = None
        self.published: dict[int, WeightVersion] = {}
        self.records: dict[str, Record] = {}
        self.leases: dict[int, Lease] = {}
        self.parked: dict[str, int] = {}
        """Workers that wait in a pull, in order of arrival, and for how many requests."""
        self.finals, self.evals = Pending(), Pending()
        self.started_drafts: dict[int, Pending] = {}
        """Drafts with a saved state, by the version that it was made with."""
        self.stopped: str | None = None
        """Why the run is over, once it is."""
        self.newest_iteration = 0
        self.oldest_iteration = 0
        self.out: list[ev.Command] = []
        self.now = 0.0
        self._next_token = first_token

    # ------------------------------------------------------------------------------------ handing out

    def offer_parked(self, *, drafts: bool = True) -> None:
        """Something may have become available: let the waiting workers have it, in order of arrival."""
        if self.parked:
            self._offer(list(self.parked), drafts)

    def offer(self, worker: Worker) -> None:
        """Grant a waiting worker the best there is for it."""
        self._offer([worker.name], drafts=True)

    def _offer(self, names: list[str], drafts: bool) -> None:
        straggler = self._straggler()
        for name in names:
            if not (self.finals or self.evals or straggler or (drafts and self.drafting)):
                return
            worker = self.members.workers[name]
            if not self.members.serving(worker):
                continue
            if name in self.members.fresh and self._grant_fresh(worker, straggler):
                straggler = self._straggler()
            elif drafts and worker.role == "spot":
                drafts = self._grant_drafts(worker)

    def _grant_fresh(self, worker: Worker, straggler: Straggler | None) -> bool:
        """Finals, evals, or a second run of the straggler; whether there was anything for this worker."""
        for queue in (self.finals, self.evals):
            if queue and not self._sooner_elsewhere(worker, queue):
                share = -(-len(queue) // len(self.members.fresh))
                self.grant(worker, queue.pop(min(self.parked[worker.name], share)))
                return True
        if straggler is None or self.finals or self.evals or straggler.worker is worker:
            return False
        own_s = self._predict_s(worker, straggler.record)
        if own_s is None or straggler.left_s <= self.policy.duplicate_factor * own_s:
            return False
        self.grant(worker, [straggler.record])
        return True

    def _sooner_elsewhere(self, worker: Worker, queue: Pending) -> bool:
        """Whether workers busy now could have done all that is left before this one had done one of it."""
        if len(queue) >= len(self.members.fresh) or not (head := queue.peek()):
            return False
        own_s = self._predict_s(worker, head)
        return own_s is not None and self.members.busy.count_between(self.now, self.now + own_s) >= len(queue)

    def _straggler(self) -> Straggler | None:
        """The final in its only run that should end last; none while there is other work for everyone."""
        if self.finals or self.evals or not self.leases:
            return None
        worst = None
        for name in self.members.busy.extremes(2):
            worker = self.members.workers[name]
            for lease in worker.leases.values():
                record = self.records[lease.request.id]
                if lease.request.kind == "final" and len(record.tokens) == 1:
                    left_s = self.left_s(lease)
                    if left_s is not None and (worst is None or left_s > worst.left_s):
                        worst = Straggler(record, worker, left_s)
        return worst

    def _predict_s(self, worker: Worker, record: Record) -> float | None:
        """Seconds that the worker would need for what is left of the request from its last saved state."""
        steps = record.request.num_steps - record.resume_step
        return self.costs.predict_s(worker.name, record.request.batch_key, steps)

    def left_s(self, lease: Lease) -> float | None:
        """Seconds until the lease should end. An overdue one is taken to need as long again as it is late."""
        steps = (lease.request.num_steps - lease.step) * lease.batch_size
        left_s = self.costs.predict_s(lease.worker.name, lease.request.batch_key, steps)
        return None if left_s is None else abs(lease.progress_at + left_s - self.now)

    def _grant_drafts(self, worker: Worker) -> bool:
        """Drafts for this worker; False if there are none for anyone."""
        current, version = self.members.current, worker.version
        if self.drafting is None or current is None or version is None:
            return False
        if version < current.n - self.policy.max_draft_lag:
            return True
        started = self.started_drafts.get(version)
        if started:
            self.grant(worker, started.pop(self.parked[worker.name]))
        elif records := self._next_drafts(self.parked[worker.name]):
            self.grant(worker, records)
        else:
            return any(self.started_drafts.values())
        return True

    def _next_drafts(self, max_requests: int) -> list[Record]:
        """The draft source's next choices, less any that it asks for twice."""
        if self.drafts is None or self.drafting is None:
            return []
        records = []
        for row, seed in self.drafts.next_drafts(max_requests, self.now):
            sample = SampleId(self.drafting.iteration, row, seed)
            request = Request("draft", sample, self.drafting.batch_key, self.drafting.num_steps)
            record = self.records.setdefault(request.id, Record(request, request.id))
            free = record.fate is None and not record.tokens and record.queued_in is None
            if free and record not in records:
                records.append(record)
        return records

    def grant(self, worker: Worker, records: list[Record]) -> None:
        """Lease the records to the worker as one batch."""
        self.parked.pop(worker.name, None)
        assert worker.version is not None
        batch, now = self._next_token, self.now
        for record in records:
            token = self._next_token
            self._next_token += 1
            step, again = record.resume_step, bool(record.tokens)
            lease = Lease(token, record.request, worker, worker.version, batch, len(records), step, now, now)
            self.leases[token] = worker.leases[token] = lease
            record.tokens.append(token)
            self.out.append(
                ev.Grant(worker.name, worker.epoch, token, batch, record.request, worker.version, step, again)
            )
        self.members.watch_stalls(worker, self.now)
        self._book(worker, records[0])

    def _book(self, worker: Worker, record: Record) -> None:
        """Note when the worker could have done one request more."""
        key, steps = record.request.batch_key, record.request.num_steps
        one_more_s = self.costs.predict_s(worker.name, key, steps)
        if one_more_s is not None:
            left = sum(lease.request.num_steps - lease.step for lease in worker.leases.values())
            self.members.busy.put(worker.name, self.now + one_more_s * (1 + left / steps))

    def wake(self, worker: Worker, reason: str) -> None:
        """Send a waiting worker away with nothing."""
        del self.parked[worker.name]
        self.out.append(ev.Wake(worker.name, worker.epoch, reason))

    # ------------------------------------------------------------------------------------ taking back

    def end(self, lease: Lease) -> None:
        """The token has passed."""
        del self.leases[lease.token]
        del lease.worker.leases[lease.token]
        self.records[lease.request.id].tokens.remove(lease.token)
        if not lease.worker.leases:
            self.members.busy.remove(lease.worker.name)

    def revoke(self, lease: Lease, reason: str, *, deaths: int = 0) -> None:
        """End a lease without a commit; its request waits again unless another run of it goes on."""
        self.end(lease)
        record = self.records[lease.request.id]
        record.deaths += deaths
        self.out.append(ev.Revoked(lease.token, lease.worker.name, record.id, reason, record.resume_step))
        if record.fate is not None:
            return
        if record.deaths >= self.policy.max_deaths:
            self.cancel(record, f"poison: {record.deaths} failures, the last: {reason}")
        elif not record.tokens:
            self._requeue(record)

    def _requeue(self, record: Record) -> None:
        request = record.request
        if request.kind != "draft" or record.state:
            self.queue_of(record).push(record)
        elif self.drafts:
            self.drafts.draft_returned(request.sample.row, request.sample.seed)

    def queue_of(self, record: Record) -> Pending:
        """Where the record waits."""
        if record.request.kind == "draft":
            assert record.state is not None
            return self.started_drafts.setdefault(record.state.version, Pending())
        return self.finals if record.request.kind == "final" else self.evals

    def cancel(self, record: Record, reason: str) -> None:
        """The request ends here, whoever is at it."""
        handed_out = bool(record.tokens or record.queued_in)
        self._unqueue(record)
        record.fate = reason
        self.out.append(ev.Cancelled(record.id, reason))
        for token in list(record.tokens):
            self.revoke(self.leases[token], f"cancelled: {reason}")
        record.state = None
        if record.request.kind == "draft" and self.drafts:
            sample = record.request.sample
            if record.deaths >= self.policy.max_deaths:
                self.drafts.draft_done(sample.row, sample.seed, None, 0.0, self.now)
            elif handed_out:
                self.drafts.draft_returned(sample.row, sample.seed)

    def _unqueue(self, record: Record) -> None:
        if record.queued_in is not None:
            self.queue_of(record).discard(record)

    def drop_state(self, record: Record, reason: str) -> None:
        """Start over from the noise, wherever the request is now."""
        if record.state is not None:
            waiting = record.queued_in is not None
            self._unqueue(record)
            self.out.append(ev.StateDropped(record.id, record.state.step, reason))
            record.state = None
            if waiting:
                self._requeue(record)

    def close_drafts(self, reason: str) -> None:
        """Cancel every draft that has no fate yet."""
        self.drafting = None
        for record in [r for r in self.records.values() if r.request.kind == "draft" and r.fate is None]:
            self.cancel(record, reason)
        self.started_drafts.clear()

    def drop_stale(self) -> None:
        """After a publish: take back what was made with weights that its kind may no longer have."""
        for lease in list(self.leases.values()):
            if lease.version < self._oldest_version(lease.request):
                self.revoke(lease, "weights too old")
        for record in self.records.values():
            if (
                record.fate is None
                and record.state
                and record.state.version < self._oldest_version(record.request)
            ):
                self.drop_state(record, "weights too old")

    def _oldest_version(self, request: Request) -> int:
        assert self.members.current is not None
        return self.members.current.n - (self.policy.max_draft_lag if request.kind == "draft" else 0)

    def forget_old_iterations(self) -> None:
        """Drop the fates of iterations that are long over, so that memory stays bounded."""
        oldest = self.newest_iteration - self.policy.keep_iterations
        if oldest > self.oldest_iteration:
            self.oldest_iteration = oldest
            if self.drafting and self.drafting.iteration < oldest:
                self.close_drafts("their iteration is long over")
            self.records = {
                name: record
                for name, record in self.records.items()
                if record.fate is None or record.request.sample.iteration >= oldest
            }
