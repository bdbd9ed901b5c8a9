"""Who worked when, read off the scheduler's own journal records; nobody has to keep a second book.

A worker's GPUs are busy from a grant to the end of its last lease. Time up to a commit is useful; time whose
result was thrown away (a revoked lease, back to its last saved step; a duplicate that lost) is lost. Trainers
work while the driver's phases "train" and "publish" last. All else between ready and end is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotlight.core.cost import NodeWorked, WorkKind
from spotlight.core.verdict import reading

_TRAINER_PHASES = ("train", "publish")


@dataclass(slots=True)
class _Worker:
    """One group of GPUs. `mark_s`: up to here its time is accounted for."""

    gpus: Counter[str]
    tokens: set[int] = field(default_factory=set)
    mark_s: float = 0.0


@dataclass(slots=True)
class _Lease:
    worker: str
    saved_s: float | None = None


class WorkReader:
    """Takes journal records in their order and yields a `NodeWorked` for each stretch that has ended.

    Records of other types, and leases of workers that it has not seen, are passed over.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._leases: dict[int, _Lease] = {}
        self._launches: dict[str, int] = {}
        self._trainers: dict[str, int] = {}
        self._phases: dict[str, float] = {}
        self._to_utc_s: float | None = None

    def add(self, record: Mapping[str, Any]) -> Iterator[NodeWorked]:
        """Take in one record of any type. Raises DataError for one that lacks what its type has."""
        with reading(record):
            yield from self._add(record)

    def _add(self, record: Mapping[str, Any]) -> Iterator[NodeWorked]:
        match record.get("type"):
            case "on":
                yield from self._on(record)
            case "phase":
                yield from self._phase(record)
            case "node" if record.get("kind") == "requested":
                self._requested(record)
            case "start":  # a new coordinator: new workers, new clock
                self._workers.clear()
                self._leases.clear()
                self._to_utc_s = None

    def _requested(self, record: Mapping[str, Any]) -> None:
        node = record["node"]
        self._launches[node] = max(self._launches.get(node, 0), record.get("launch", 0))
        if record.get("role") == "trainer":
            self._trainers[node] = max(1, record.get("gpus", 1))

    def _on(self, record: Mapping[str, Any]) -> Iterator[NodeWorked]:
        event, commands = record["event"], record["commands"]
        if event["type"] == "Join":
            members = Counter(gpu["node"] for gpu in event.get("members", ())) or Counter([event["node"]])
            self._workers[event["worker"]] = _Worker(members)
        if not commands:
            return
        at_s = self._utc_s(record)
        for command in commands:
            match command["type"]:
                case "Grant":
                    self._granted(command, at_s)
                case "Progressed" if command["saved"] and command["token"] in self._leases:
                    self._leases[command["token"]].saved_s = at_s
                case "Accepted":
                    yield from self._ended(command["token"], at_s, "useful")
                case "Revoked":
                    yield from self._ended(command["token"], at_s, "lost")

    def _granted(self, grant: Mapping[str, Any], at_s: float) -> None:
        worker = self._workers.get(grant["worker"])
        if worker is None:
            return
        if not worker.tokens:
            worker.mark_s = at_s
        worker.tokens.add(grant["token"])
        self._leases[grant["token"]] = _Lease(grant["worker"])

    def _ended(self, token: int, at_s: float, work: WorkKind) -> Iterator[NodeWorked]:
        lease = self._leases.pop(token, None)
        if lease is None:
            return
        worker = self._workers[lease.worker]
        worker.tokens.discard(token)
        if work == "lost" and lease.saved_s is not None and lease.saved_s > worker.mark_s:
            yield from self._stretch(worker.gpus, worker.mark_s, lease.saved_s, "useful")
            worker.mark_s = lease.saved_s
        yield from self._stretch(worker.gpus, worker.mark_s, at_s, work)
        worker.mark_s = at_s

    def _phase(self, record: Mapping[str, Any]) -> Iterator[NodeWorked]:
        phase, at_s = record["phase"], self._utc_s(record)
        if record["state"] == "begin":
            self._phases[phase] = at_s
        elif phase in _TRAINER_PHASES and phase in self._phases:
            yield from self._stretch(self._trainers, self._phases.pop(phase), at_s, "useful")

    def _stretch(
        self, gpus: Mapping[str, int], start_s: float, end_s: float, work: WorkKind
    ) -> Iterator[NodeWorked]:
        if end_s > start_s:
            for node, count in gpus.items():
                launch = self._launches.get(node, 0)
                yield NodeWorked(node=node, launch=launch, start_s=start_s, at_s=end_s, gpus=count, work=work)

    def _utc_s(self, record: Mapping[str, Any]) -> float:
        """UTC of a record by the coordinator's monotonic `now`: a stepped wall clock moves nothing."""
        if self._to_utc_s is None:
            self._to_utc_s = float(record["utc"]) - float(record["now"])
        return self._to_utc_s + float(record["now"])
