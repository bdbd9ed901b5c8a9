"""The coordinator: one actor per run, on the on-demand head, that hands out work and hears what became of it.

Calls take and return plain values: text, numbers, lists, dicts and bytes. A call with a value that cannot
be raises DataError and changes nothing. What is decided is decided in `core.scheduler`; here is only the
wire.

A worker's life: register -> (admitted -> pull -> renew, save_state, ... -> commit | fail | release) again
and again. The reply to `register` carries the epoch that the worker's calls must name from then on;
`fenced` in a reply means that this epoch has passed: drop everything, admit nothing, register anew. `renew`
is the heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spotlight.core import events as ev
from spotlight.runtime.shell import Reply, Shell

MAX_CALLS = 10_000  # calls that may wait at once: a long poll of each worker, and room for the others
GATHER_S = 0.01  # fates that come so soon after the first travel with it: a call costs far more than a fate


class Coordinator:
    """Made into an actor by `start_coordinator`; all methods run on one event loop."""

    def __init__(
        self,
        folder: str,
        policy: Mapping[str, Any] | None = None,
        planner: Mapping[str, Any] | None = None,
        tick_s: float = 0.1,
    ) -> None:
        self._shell = Shell(Path(folder), policy or {}, planner, tick_s)
        self._num_collected = 0

    async def ready(self) -> bool:
        """Call once: from here on time passes, and silent workers are found."""
        self._shell.start_ticking()
        return True

    # ------------------------------------------------------------------------------------ for workers

    async def register(
        self, worker: str, node: str, role: str, info: Mapping[str, Any] | None = None
    ) -> Reply:
        """Join: {epoch, version, stop, cooling_s}. `info["members"]`: the group's GPUs as {node, index}."""
        info = dict(info or {})
        members = info.get("members", [])
        commands = self._shell.apply("Join", worker=worker, node=node, role=role, members=members)
        joined = _one(commands, ev.Joined)
        self._shell.journal.append({"type": "worker", "worker": worker, "epoch": joined.epoch, "info": info})
        return {"epoch": joined.epoch, "cooling_s": joined.cooling_s, **self._shell.standing()}

    async def admitted(self, worker: str, epoch: int, version: int, digest: str, num_tensors: int) -> Reply:
        """Weights are bound: {accepted, reason, fenced}. Not accepted: the worker must not use them."""
        commands = self._shell.apply(
            "Admit", worker=worker, epoch=epoch, version=version, digest=digest, num_tensors=num_tensors
        )
        answer = commands[0]
        reason = answer.reason if isinstance(answer, ev.AdmissionRefused | ev.Wake) else ""
        return {"accepted": not reason, "reason": reason, "fenced": isinstance(answer, ev.Wake)}

    async def pull(
        self,
        worker: str,
        epoch: int,
        max_requests: int,
        timeout_s: float,
        results: Sequence[tuple[int, Mapping[str, Any]]] = (),
    ) -> Reply:
        """Wait for work at most so long: {grants, version, stop, fenced, answers}. A new pull ends an older one.

        `results` are (token, outcome) to commit first, which saves a call each; `answers` are what `commit` says.
        A grant is {token, batch, request, version, resume_step, state, duplicate}; all of a reply may share
        a batch.
        """
        event = ev.decode({"type": "Pull", "worker": worker, "epoch": epoch, "max_requests": max_requests})
        answers = [self._commit(token, outcome) for token, outcome in results]
        waiter = self._shell.wait(worker, epoch)
        try:
            self._shell.take(event)
            if not waiter.done():
                await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            if not waiter.done():
                self._shell.take(ev.EndPull(worker, epoch))
                self._shell.answer(worker, epoch)
        return {**waiter.result(), "answers": answers}

    async def end_pull(self, worker: str, epoch: int) -> None:
        """Let the worker's waiting pull return now, with nothing."""
        self._shell.take(ev.EndPull(worker, epoch))
        self._shell.answer(worker, epoch)

    async def renew(self, worker: str, epoch: int, beats: Sequence[Mapping[str, int]]) -> Reply:
        """Live on: {cancelled, stop_at, fenced, version, stop}. `beats`: every token held, as {token, step}.

        Drop the tokens of `cancelled`. Stop each of `stop_at` after that step, or at once if it is past,
        save its state and release it.
        """
        pairs = [[beat.get("token"), beat.get("step")] for beat in beats]
        renewed = _one(self._shell.apply("Heartbeat", worker=worker, epoch=epoch, beats=pairs), ev.Renewed)
        return {
            "cancelled": list(renewed.cancelled),
            "stop_at": dict(renewed.stop_at),
            "fenced": renewed.fenced,
            **self._shell.standing(),
        }

    async def save_state(self, token: int, step: int, blob: bytes) -> Reply:
        """Keep a denoising state: {saved, cancelled, stop_at, reason}. Older than what is kept: not saved."""
        digest = f"crc32:{zlib.crc32(blob):08x}"
        answer = self._shell.apply("Progress", token=token, step=step, digest=digest, num_bytes=len(blob))[0]
        if isinstance(answer, ev.Refused):
            return {"saved": False, "cancelled": True, "stop_at": None, "reason": answer.reason}
        assert isinstance(answer, ev.Progressed)
        if answer.saved:
            self._shell.states[answer.request] = blob
        return {"saved": answer.saved, "cancelled": False, "stop_at": answer.stop_at, "reason": ""}

    async def save_states(self, states: Sequence[tuple[int, int, bytes]]) -> list[Reply]:
        """`save_state` of several (token, step, blob), in order."""
        return [await self.save_state(*state) for state in states]

    async def commit(self, token: int, outcome: Mapping[str, Any]) -> Reply:
        """Report a finished request, its artifact stored: {accepted, reason}. May be repeated safely."""
        return self._commit(token, outcome)

    async def fail(self, token: int, reason: str) -> Reply:
        """The request could not be made: {accepted, reason}. Others will try, three times in all."""
        return self._verdict("Fail", token=token, reason=reason)

    async def release(self, token: int) -> Reply:
        """Hand a lease back: {accepted, reason}. It goes on elsewhere from the last state saved."""
        return self._verdict("Release", token=token)

    async def worker_lost(self, worker: str, epoch: int, reason: str) -> None:
        """The worker's process ended, says whoever saw it."""
        self._shell.apply("WorkerLost", worker=worker, epoch=epoch, reason=reason)

    async def notice(self, node: str, deadline_s: float, source: str) -> None:
        """The node will be taken in so many seconds."""
        self._shell.apply("Notice", node=node, deadline_s=deadline_s, source=source)

    async def notice_withdrawn(self, node: str) -> None:
        """It will not be taken after all."""
        self._shell.apply("WithdrawNotice", node=node)

    # ------------------------------------------------------------------------------------ for the driver

    async def node_lost(self, node: str, reason: str, preempted: bool) -> None:
        """The node is gone. Unless it was `preempted`, a request that it was making may be to blame."""
        self._shell.apply("NodeLost", node=node, reason=reason, preempted=preempted)

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """New finals or evals, each {kind, sample: "it1/row2/s3", batch_key, num_steps}."""
        self._shell.apply("Submit", requests=[_untyped(request) for request in requests])

    async def cancel(self, kind: str, iteration: int, reason: str) -> None:
        """Give up what is unfinished of a kind and iteration."""
        self._shell.apply("Cancel", kind=kind, iteration=iteration, reason=reason)

    async def collect(self, since: int, timeout_s: float) -> Reply:
        """Fates from number `since` on, waiting for the first ones: {items, next, drafts_complete}.

        An item is {fate: "committed", request, outcome} or {fate: "cancelled", request, reason}. Asking
        from n on says that all before n have arrived and may be forgotten.
        """
        shell = self._shell
        del shell.results[: max(since - self._num_collected, 0)]
        self._num_collected = max(since, self._num_collected)
        if not shell.results:
            shell.news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(shell.news.wait(), timeout_s)
                await asyncio.sleep(GATHER_S)
        complete = shell.drafting is not None and shell.drafting.planner.complete
        items = list(shell.results)
        return {"items": items, "next": self._num_collected + len(items), "drafts_complete": complete}

    async def open_drafts(self, spec: Mapping[str, Any]) -> bool:
        """Let idle spot workers draft (`spec` as in `Drafting.open`); False: the planner wants none."""
        shell = self._shell
        opened = shell.drafting and shell.drafting.open(spec, shell.num_spot(), time.monotonic())
        if opened:
            shell.take(opened)
        return bool(opened)

    async def close_drafts(self) -> Reply:
        """Cancel outstanding drafts; the planner's choice of seeds, as `Drafting.close` returns it."""
        self._shell.apply("CloseDrafts")
        return self._shell.drafting.close(time.monotonic()) if self._shell.drafting else {}

    async def draft_report(self, finals: Sequence[tuple[int, int, float | None]]) -> Reply | None:
        """The figures of the last plan, given its finals as (row, seed, reward) each; None before the first plan."""
        return self._shell.drafting.report(finals) if self._shell.drafting else None

    async def draft_state(self) -> Reply:
        """What the planner has learned, as plain values for a checkpoint."""
        return self._shell.drafting.state() if self._shell.drafting else {}

    async def restore_drafts(self, state: Mapping[str, Any]) -> None:
        """Give the planner what `draft_state` had returned."""
        if self._shell.drafting and state:
            self._shell.drafting.restore(dict(state))

    async def publish(self, version: int, digest: str, num_tensors: int) -> None:
        """Make a weights version current."""
        self._shell.apply("Publish", version=version, digest=digest, num_tensors=num_tensors)

    async def note(self, record: Mapping[str, Any]) -> None:
        """Put a record of another kind into the journal; it names its own `type`."""
        self._shell.note(record)

    async def snapshot(self) -> Reply:
        """Members and counts, for the status."""
        return self._shell.snapshot()

    async def stop(self, reason: str = "run over") -> None:
        """Cancel what is unfinished, send the workers home, close the journal."""
        self._shell.apply("Stop", reason=reason)
        self._shell.journal.close()

    def _commit(self, token: int, outcome: Mapping[str, Any]) -> Reply:
        return self._verdict("Commit", token=token, outcome=_untyped(outcome))

    def _verdict(self, name: str, **fields: Any) -> Reply:
        answer = self._shell.apply(name, **fields)[0]
        refused = isinstance(answer, ev.Refused)
        return {"accepted": not refused, "reason": answer.reason if isinstance(answer, ev.Refused) else ""}


def start_coordinator(
    folder: Path,
    *,
    policy: Mapping[str, Any] | None = None,
    planner: Mapping[str, Any] | None = None,
    tick_s: float = 0.1,
    **options: Any,
) -> Any:
    """The actor's handle, its time running. `options` are Ray's: name, namespace, resources, ..."""
    import ray

    actor = ray.remote(Coordinator).options(**{"num_cpus": 0, "max_concurrency": MAX_CALLS, **options})
    handle = actor.remote(str(folder), policy, planner, tick_s)
    ray.get(handle.ready.remote())
    return handle


def _one(commands: list[ev.Command], kind: type) -> Any:
    return next(command for command in commands if isinstance(command, kind))


def _untyped(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "type"}
