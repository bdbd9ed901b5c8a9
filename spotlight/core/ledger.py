"""The ledger: what machines a run had, from when to when, at which prices, and why each one ended.

One row per *node interval*, never per cluster: a name that is launched again is a second row (`launch`).
Nothing is inferred from what should have happened; where something was not seen, the ledger says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NamedTuple

from spotlight.core.cost import (
    OWN_SOURCE,
    DiskEnded,
    EndReason,
    Market,
    NodeBilled,
    NodeEgress,
    NodeEnded,
    NodeNotice,
    NodeReady,
    NodeRequested,
    NodeUp,
    NodeWorked,
    PriceClass,
    PricePoint,
    Record,
    decode,
)
from spotlight.core.work import WorkReader


class NodeKey(NamedTuple):
    """A machine: its name and how many times that name had been launched before."""

    node: str
    launch: int


@dataclass(frozen=True, slots=True)
class Interval:
    """One machine from request to end. Times in UTC seconds; None: has not happened, or nobody saw it."""

    key: NodeKey
    cloud: str
    region: str
    zone: str
    instance_type: str
    gpus: int
    price_class: PriceClass
    role: str
    disk_gb: Decimal = Decimal(0)
    requested_s: float | None = None
    up_s: float | None = None
    ready_s: float | None = None
    notice_s: float | None = None
    ended_s: float | None = None
    end_reason: EndReason | None = None
    end_source: str = ""
    keeps_disk: bool = False
    disk_ended_s: float | None = None
    instance_id: str = ""

    def market(self, price_class: PriceClass | None = None) -> Market:
        """The market that this machine is priced in, or the same machine's in another price class."""
        return Market(self.cloud, self.region, self.zone, self.instance_type, price_class or self.price_class)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All intervals of a run, the prices known, the work done, and what looked wrong while reading."""

    intervals: tuple[Interval, ...] = ()
    prices: Mapping[Market, tuple[PricePoint, ...]] = field(default_factory=dict)
    work: Mapping[NodeKey, tuple[NodeWorked, ...]] = field(default_factory=dict)
    egress: Mapping[NodeKey, tuple[NodeEgress, ...]] = field(default_factory=dict)
    billed: Mapping[NodeKey, NodeBilled] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def series(self, market: Market) -> tuple[PricePoint, ...]:
        """Prices of a market in time order: the zone's own, else the region's, else none."""
        return self.prices.get(market) or self.prices.get(market._replace(zone="")) or ()


def ledger_from_records(records: Iterable[Mapping[str, Any]]) -> Ledger:
    """Read a journal in one pass: records of type "node", and the work that the scheduler's records tell of.

    A node record twice changes nothing. Raises DataError for one that cannot be read.
    """
    reader, work = LedgerReader(), WorkReader()
    for raw in records:
        if raw.get("type") == "node":
            reader.add(decode(raw))
        for record in work.add(raw):
            reader.add(record)
    return reader.ledger()


class LedgerReader:
    """Collects records one by one, in any order; `ledger()` may be asked at any time."""

    def __init__(self) -> None:
        self._rows: dict[NodeKey, dict[type[Record], Any]] = {}
        self._prices: dict[Market, dict[float, PricePoint]] = {}
        self._work: dict[
            NodeKey, dict[NodeWorked, None]
        ] = {}  # dicts as ordered sets: a record twice is once
        self._egress: dict[NodeKey, dict[NodeEgress, None]] = {}
        self._billed: dict[NodeKey, NodeBilled] = {}
        self._anchors: dict[str, float] = {}
        self._warnings: dict[str, None] = {}

    def add(self, record: Record) -> None:
        """Take in one record."""
        record = self._steadied(record)
        match record:
            case PricePoint():
                self._prices.setdefault(record.market, {})[record.at_s] = record
            case NodeWorked():
                self._work.setdefault(NodeKey(record.node, record.launch), {})[record] = None
            case NodeEgress():
                self._egress.setdefault(NodeKey(record.node, record.launch), {})[record] = None
            case NodeBilled():
                self._billed[NodeKey(record.node, record.launch)] = record
            case _:
                self._add_event(record)

    def ledger(self) -> Ledger:
        """The ledger of all records so far."""
        warnings = dict(self._warnings)
        rows = {key: row for key, row in self._rows.items() if NodeRequested in row}
        for key in self._rows.keys() - rows.keys():
            warnings[f"{name(key)}: events of a node that was never requested; not priced"] = None
        intervals = sorted(
            (_interval(key, row) for key, row in rows.items()), key=lambda i: (i.requested_s or 0.0, i.key)
        )
        return Ledger(
            intervals=tuple(_closed_by_relaunch(intervals, warnings)),
            prices={m: tuple(points[t] for t in sorted(points)) for m, points in self._prices.items()},
            work={k: tuple(v) for k, v in self._work.items()},
            egress={k: tuple(v) for k, v in self._egress.items()},
            billed=dict(self._billed),
            warnings=tuple(warnings),
        )

    def _add_event(self, record: Any) -> None:
        row = self._rows.setdefault(NodeKey(record.node, record.launch), {})
        old = row.get(type(record))
        if old is None or _outranks(record, old):
            row[type(record)] = record

    def _steadied(self, record: Record) -> Record:
        """The record at the time of its writer's monotonic clock, anchored at the writer's first record."""
        if record.mono_s is None or not hasattr(record, "at_s"):
            return record
        anchor = self._anchors.setdefault(record.clock, record.at_s - record.mono_s)
        steady_s = anchor + record.mono_s
        if abs(steady_s - record.at_s) > 1.0:
            self._warnings["the wall clock stepped during the run; lengths are by the monotonic clock"] = None
        moved: dict[str, Any] = {"at_s": steady_s}
        if isinstance(record, NodeWorked):
            moved["start_s"] = record.start_s + steady_s - record.at_s
        return replace(record, **moved)


def name(key: NodeKey) -> str:
    """How a report calls a machine: its name, with "#n" from the second launch on."""
    return key.node if key.launch == 0 else f"{key.node}#{key.launch}"


def _outranks(new: Any, old: Any) -> bool:
    """Which of two records of the same event counts: a cloud's word about a machine, else the earlier."""
    if isinstance(new, NodeUp | NodeEnded):
        own_new, own_old = new.source == OWN_SOURCE, old.source == OWN_SOURCE
        if own_new != own_old:
            return own_old
        if not own_new:
            return True  # the cloud corrects itself
    return bool(new.at_s < old.at_s)


def _interval(key: NodeKey, row: Mapping[type[Record], Any]) -> Interval:
    asked: NodeRequested = row[NodeRequested]
    up: NodeUp | None = row.get(NodeUp)
    end: NodeEnded | None = row.get(NodeEnded)

    def at(cls: type[Record]) -> float | None:
        return row[cls].at_s if cls in row else None

    return Interval(
        key=key,
        cloud=asked.cloud,
        region=(up and up.region) or asked.region,
        zone=(up and up.zone) or asked.zone,
        instance_type=asked.instance_type,
        gpus=asked.gpus,
        price_class=asked.price_class,
        role=asked.role,
        disk_gb=asked.disk_gb,
        requested_s=asked.at_s,
        up_s=up.at_s if up else (asked.at_s if _existed(row) else None),
        ready_s=at(NodeReady),
        notice_s=at(NodeNotice),
        ended_s=at(NodeEnded),
        end_reason=end.reason if end else None,
        end_source=end.source if end else "",
        keeps_disk=bool(end and end.keeps_disk),
        disk_ended_s=at(DiskEnded),
        instance_id=up.instance_id if up else "",
    )


def _existed(row: Mapping[type[Record], Any]) -> bool:
    """Whether a machine that nobody saw coming up must have been there: it is billed from the request."""
    end: NodeEnded | None = row.get(NodeEnded)
    return NodeReady in row or bool(end and end.reason in ("interrupted", "stopped"))


def _closed_by_relaunch(intervals: list[Interval], warnings: dict[str, None]) -> Iterable[Interval]:
    """End a machine that nobody saw ending when its name was launched again: two cannot hold one name."""
    next_s: dict[NodeKey, float] = {
        NodeKey(i.key.node, i.key.launch - 1): i.requested_s for i in intervals if i.requested_s is not None
    }
    for item in intervals:
        if item.ended_s is None and item.key in next_s and item.up_s is not None:
            warnings[f"{name(item.key)}: its end was not seen; taken as the moment it was launched again"] = (
                None
            )
            item = replace(item, ended_s=next_s[item.key], end_reason="unknown", end_source="relaunch")
        yield item
