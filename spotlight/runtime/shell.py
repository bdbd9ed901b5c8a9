"""Scheduler, journal and denoising states: takes an event, writes it down, carries its commands out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spotlight.core import events as ev
from spotlight.core.scheduler import Scheduler
from spotlight.core.types import Policy
from spotlight.errors import DataError
from spotlight.observe.journal import Journal, next_first_token
from spotlight.runtime.drafting import Drafting, drafting

Reply = dict[str, Any]
log = logging.getLogger(__name__)


class Shell:
    """Single writer of all three. Every event is journalled before its commands have any effect."""

    def __init__(
        self, folder: Path, policy: Mapping[str, Any], planner: Mapping[str, Any] | None, tick_s: float
    ) -> None:
        settings: Policy = ev.decode({"type": "Policy", **policy})
        first_token = next_first_token(folder)
        self.drafting: Drafting | None = drafting(planner) if planner else None
        self.journal = Journal(folder)
        self.journal.append({"type": "start", "policy": ev.encode(settings), "first_token": first_token})
        self.scheduler = Scheduler(settings, self.drafting, first_token=first_token)
        self.states: dict[str, bytes] = {}
        self.results: list[Reply] = []
        self.news = asyncio.Event()
        self._waiters: dict[tuple[str, int], asyncio.Future[Reply]] = {}
        self._tick_s = tick_s
        self._ticker: asyncio.Task[None] | None = None

    def take(self, event: ev.Event) -> list[ev.Command]:
        """One step of the run. A tick without commands leaves no trace, so it is not written down."""
        now = time.monotonic()
        commands = self.scheduler.on(event, now)
        if commands or not isinstance(event, ev.Tick):
            encoded = ev.encode(event)
            record = {
                "type": "on",
                "now": now,
                "event": encoded,
                "commands": [ev.encode(command) for command in commands],
            }
            if self.drafting and (answers := self.drafting.take_answers()):
                record["drafts"] = answers
            self.journal.append(record)
            self._carry_out(encoded, commands)
        return commands

    def apply(self, name: str, **fields: Any) -> list[ev.Command]:
        """`take` an event made of plain values. DataError, with nothing changed, if they cannot be one."""
        return self.take(ev.decode({"type": name, **fields}))

    def standing(self) -> Reply:
        """What every worker should know: the current version, and whether the run is over."""
        current = self.scheduler.members.current
        return {"version": current.n if current else None, "stop": self.scheduler.stopped is not None}

    def note(self, record: Mapping[str, Any]) -> None:
        """Journal a record of another kind. Raises DataError if it has no type of its own or is not JSON."""
        kind = record.get("type")
        if not isinstance(kind, str) or kind in ("on", "start", "gap"):
            raise DataError(f"not a record to note: type {str(kind)[:40]!r}")
        try:
            self.journal.append(record)
        except (ValueError, TypeError) as error:
            raise DataError(f"not a record to note: {error}") from error

    def snapshot(self) -> Reply:
        """Members, counts, and how memory and journal are doing."""
        return {
            **self.scheduler.snapshot(),
            "states": len(self.states),
            "state_bytes": sum(map(len, self.states.values())),
            "journal_lost": self.journal.lost,
            "journal_problem": self.journal.problem,
        }

    # ------------------------------------------------------------------------------------ waiting pulls

    def wait(self, worker: str, epoch: int) -> asyncio.Future[Reply]:
        """A place for the worker's next grants. One that it had before is answered with nothing."""
        self.answer(worker, epoch)
        waiter = self._waiters[worker, epoch] = asyncio.get_running_loop().create_future()
        return waiter

    def answer(
        self, worker: str, epoch: int, grants: Sequence[ev.Grant] = (), *, fenced: bool = False
    ) -> bool:
        """Answer the worker's pull, if it waits in one."""
        waiter = self._waiters.pop((worker, epoch), None)
        if waiter is None or waiter.done():
            return False
        wire = [self._wire(grant) for grant in grants]
        waiter.set_result({"grants": wire, "fenced": fenced, **self.standing()})
        return True

    # ------------------------------------------------------------------------------------ commands

    def _carry_out(self, event: Reply, commands: list[ev.Command]) -> None:
        batches: dict[tuple[str, int], list[ev.Grant]] = {}
        for command in commands:
            match command:
                case ev.Grant(worker=worker, epoch=epoch):
                    batches.setdefault((worker, epoch), []).append(command)
                case ev.Wake(worker=worker, epoch=epoch, reason=reason):
                    self.answer(worker, epoch, fenced=reason == "fenced")
                case ev.LostWorker(worker=worker, epoch=epoch):
                    self.answer(worker, epoch, fenced=True)
                case ev.StateDropped(request=request):
                    self.states.pop(request, None)
                case ev.Accepted(request=request, again=False):
                    made = {"fate": "committed", "request": request, "outcome": event["outcome"]}
                    self._settle(request, made)
                case ev.Cancelled(request=request, reason=reason):
                    self._settle(request, {"fate": "cancelled", "request": request, "reason": reason})
        for (worker, epoch), grants in batches.items():
            if not self.answer(worker, epoch, grants):
                log.error("grant for %s, which does not wait; taken back", worker)
                for grant in grants:
                    self.take(ev.Release(grant.token))

    def _settle(self, request: str, result: Reply) -> None:
        self.states.pop(request, None)
        self.results.append(result)
        self.news.set()

    def _wire(self, grant: ev.Grant) -> Reply:
        return {
            "token": grant.token,
            "batch": grant.batch,
            "request": ev.encode(grant.request),
            "version": grant.version,
            "resume_step": grant.resume_step,
            "state": self.states.get(grant.request.id) if grant.resume_step else None,
            "duplicate": grant.duplicate,
        }

    # ------------------------------------------------------------------------------------ time

    def start_ticking(self) -> None:
        """Let time pass for the scheduler; needs a running event loop. Again: no effect."""
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        last = time.monotonic()
        while self.scheduler.stopped is None:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            self.take(ev.Tick(now - last))
            last = now
            if self.drafting:
                self.drafting.planner.set_workers(self.num_spot(), now)
            await asyncio.to_thread(self.journal.sync)  # a slow disk must not hold up a heartbeat

    def num_spot(self) -> int:
        """Spot workers that live."""
        return sum(worker.role == "spot" for worker in self.scheduler.members.workers.values())
