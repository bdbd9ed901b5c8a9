"""Figures of a run that only its journal knows: how busy spot workers were, what moved, what was lost.

Busy time of a worker is the union of the times in which it held a lease; its available time runs from its first
admitted weights to its loss. Shares are taken inside the windows that `phase` records open and close.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotlight.observe.journal import segments


@dataclass(slots=True)
class _Worker:
    node: str
    spot: bool
    leases: set[int] = field(default_factory=set)
    busy_since: float | None = None
    here_since: float | None = None
    busy_s: float = 0.0
    here_s: float = 0.0

    def times(self, now: float) -> tuple[float, float]:
        """(busy, available) seconds up to `now`."""
        busy = self.busy_s + (now - self.busy_since if self.busy_since is not None else 0.0)
        here = self.here_s + (now - self.here_since if self.here_since is not None else 0.0)
        return busy, here

    def close(self, now: float) -> None:
        self.busy_s, self.here_s = self.times(now)
        self.busy_since = self.here_since = None
        self.leases.clear()


@dataclass(slots=True)
class Window:
    """One training phase: seconds of it, of spot workers available in it, of spot workers busy in it."""

    iteration: int
    wall_s: float = 0.0
    available_s: float = 0.0
    busy_s: float = 0.0
    drafts: int = 0

    @property
    def busy_share(self) -> float | None:
        """None when no spot worker was there."""
        return self.busy_s / self.available_s if self.available_s > 0 else None


class RunMeter:
    """Reads a journal as it grows. `catch_up` as often as you like; every record is looked at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._workers: dict[str, _Worker] = {}
        self._holders: dict[int, tuple[str, str]] = {}  # token -> (worker, request)
        self._last_worker: dict[str, str] = {}  # request -> who had it
        self._open: tuple[Window, float, float, float] | None = None
        self._gone: set[str] = set()
        self._begun_inside: set[int] = set()  # tokens granted in the open window
        self.windows: list[Window] = []
        self.drafts = 0
        self.samples_moved = 0
        self.samples_lost = 0
        self.preemptions = 0

    def catch_up(self) -> None:
        """Feed what was written since the last time."""
        for path in segments(self._folder):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # still being written
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    self.feed(json.loads(line))

    def feed(self, record: Mapping[str, Any]) -> None:
        """Take one record; of a kind unknown here, it is passed over."""
        if record.get("type") == "phase" and record.get("phase") == "train":
            self._phase(record)
        elif record.get("type") == "start":
            self._workers.clear()  # another coordinator, another clock
            self._holders.clear()
            self._open = None
        elif record.get("type") == "on":
            now = float(record["now"])
            self._event(record["event"])
            for command in record["commands"]:
                self._command(command, now, record["event"])

    @property
    def spot_busy_share(self) -> float | None:
        """Share of all training time in which available spot workers were busy."""
        available = sum(window.available_s for window in self.windows)
        return sum(window.busy_s for window in self.windows) / available if available > 0 else None

    @property
    def drafts_in_training(self) -> int:
        """Drafts that were begun and finished inside a training window."""
        return sum(window.drafts for window in self.windows)

    def _phase(self, record: Mapping[str, Any]) -> None:
        now = float(record["now"])
        busy, here = self._spot_times(now)
        if record.get("state") == "begin":
            self._open = (Window(int(record["iteration"])), now, busy, here)
            self._begun_inside.clear()
        elif self._open is not None:
            window, began, busy_before, here_before = self._open
            window.wall_s = now - began
            window.busy_s = busy - busy_before
            window.available_s = here - here_before
            self.windows.append(window)
            self._open = None

    def _spot_times(self, now: float) -> tuple[float, float]:
        times = [worker.times(now) for worker in self._workers.values() if worker.spot]
        return sum(busy for busy, _ in times), sum(here for _, here in times)

    def _event(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "Join":
            known = self._workers.get(event["worker"])
            fresh = _Worker(event["node"], event["role"] == "spot")
            if known is not None:
                fresh.busy_s, fresh.here_s = known.busy_s, known.here_s
                fresh.here_since = known.here_since
            self._workers[event["worker"]] = fresh
            self._gone.discard(event["node"])
        elif event["type"] == "NodeLost" and event.get("preempted", True):
            # The provider says so. A node that was only silent for a while is no preemption.
            self.preemptions += event["node"] not in self._gone
            self._gone.add(event["node"])

    def _command(self, command: Mapping[str, Any], now: float, event: Mapping[str, Any]) -> None:
        kind = command["type"]
        if kind == "Admitted":
            worker = self._workers.get(command["worker"])
            if worker is not None and worker.here_since is None:
                worker.here_since = now
        elif kind == "Grant":
            self._granted(command, now)
        elif kind in ("Accepted", "Revoked", "Refused"):
            if kind == "Accepted" and not command.get("again") and command["request"].startswith("draft/"):
                self._draft(command["token"])
            self._ended(command["token"], now)
        elif kind == "Cancelled":
            for token in [t for t, (_, request) in self._holders.items() if request == command["request"]]:
                self._ended(token, now)
            self.samples_lost += command["request"].startswith("final/") and event["type"] != "Stop"
        elif kind == "LostWorker":
            worker = self._workers.get(command["worker"])
            if worker is not None:
                worker.close(now)

    def _granted(self, grant: Mapping[str, Any], now: float) -> None:
        name, request = grant["worker"], grant["request"]
        request_id = f"{request['kind']}/{request['sample']}"
        before = self._last_worker.get(request_id)
        self.samples_moved += before not in (None, name) and not grant.get("duplicate")
        self._last_worker[request_id] = name
        self._holders[grant["token"]] = (name, request_id)
        worker = self._workers.get(name)
        if worker is not None:
            worker.leases.add(grant["token"])
            worker.busy_since = now if worker.busy_since is None else worker.busy_since
        if self._open is not None:
            self._begun_inside.add(grant["token"])

    def _draft(self, token: int) -> None:
        self.drafts += 1
        if self._open is not None:
            self._open[0].drafts += token in self._begun_inside

    def _ended(self, token: int, now: float) -> None:
        name, _ = self._holders.pop(token, ("", ""))
        worker = self._workers.get(name)
        if worker is None:
            return
        worker.leases.discard(token)
        if not worker.leases and worker.busy_since is not None:
            worker.busy_s += now - worker.busy_since
            worker.busy_since = None
