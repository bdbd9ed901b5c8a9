"""The journal's records about money: machines asked for, up, ready, ended; prices; work; data sent.

They are written as things happen by whoever sees them (record type "node"), and read back into a
`core.ledger.Ledger`, which `core.billing` turns into money. Times are UTC seconds since the epoch, so neither
a time zone nor a daylight-saving change can move a bill; amounts are exact decimals in dollars.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal, NamedTuple

from spotlight.errors import DataError

PriceClass = Literal["on_demand", "spot", "reserved"]
EndReason = Literal["user", "interrupted", "stopped", "failed", "launch_failed", "unknown"]
WorkKind = Literal["useful", "lost"]

_CHOICES = {
    "price_class": ("on_demand", "spot", "reserved"),
    "reason": ("user", "interrupted", "stopped", "failed", "launch_failed", "unknown"),
    "work": ("useful", "lost"),
}
OWN_SOURCE = "own"  # an end that we saw ourselves; whatever a cloud's API says outranks it


class Market(NamedTuple):
    """What has one price. `zone` is "" for a price of the whole region (on-demand prices are)."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    price_class: PriceClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base of all journal records about money.

    `mono_s` is the writer's monotonic clock and `clock` names the process that it belongs to. With both, a
    step of the wall clock (NTP, a resumed virtual machine) does not change an interval's length.
    """

    kind: ClassVar[str]
    mono_s: float | None = None
    clock: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequested(Record):
    """A machine was asked for. Nothing is billed yet."""

    kind: ClassVar[str] = "requested"
    node: str
    launch: int = 0
    at_s: float
    cloud: str
    region: str = ""
    zone: str = ""
    instance_type: str
    gpus: int
    price_class: PriceClass
    role: str = "explorer"
    disk_gb: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp(Record):
    """The machine exists: billing begins. The zone is the one that was got, not the one asked for."""

    kind: ClassVar[str] = "up"
    node: str
    launch: int = 0
    at_s: float
    region: str = ""
    zone: str = ""
    instance_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReady(Record):
    """The machine can take work: booting is over."""

    kind: ClassVar[str] = "ready"
    node: str
    launch: int = 0
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNotice(Record):
    """The cloud said that it will take the machine back."""

    kind: ClassVar[str] = "notice"
    node: str
    launch: int = 0
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnded(Record):
    """The machine runs no longer.

    `source` is the cloud's own code ("ec2:Server.SpotInstanceTermination"), or "own" for what we saw.
    `keeps_disk`: the disk is still there, and billed, until a `DiskEnded`.
    """

    kind: ClassVar[str] = "ended"
    node: str
    launch: int = 0
    at_s: float
    reason: EndReason
    source: str = OWN_SOURCE
    keeps_disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEnded(Record):
    """The disk that outlived its machine was deleted."""

    kind: ClassVar[str] = "disk_ended"
    node: str
    launch: int = 0
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorked(Record):
    """`gpus` of the node's GPUs worked from `start_s` to `at_s`; "lost" if the result was thrown away."""

    kind: ClassVar[str] = "worked"
    node: str
    launch: int = 0
    start_s: float
    at_s: float
    gpus: int = 1
    work: WorkKind = "useful"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEgress(Record):
    """Data that left the node over a path that is paid for."""

    kind: ClassVar[str] = "egress"
    node: str
    launch: int = 0
    at_s: float
    gb: Decimal
    usd_per_gb: Decimal
    path: str = "internet"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBilled(Record):
    """What the cloud's bill says the node cost in all: replaces our estimate."""

    kind: ClassVar[str] = "billed"
    node: str
    launch: int = 0
    usd: Decimal
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PricePoint(Record):
    """From `at_s` on, one machine of this market costs `usd_per_h`, until the next point.

    `source` and `as_of` (when it was fetched) go into the report. `at_s` = -inf: it has always been that.
    """

    kind: ClassVar[str] = "price"
    cloud: str
    region: str = ""
    zone: str = ""
    instance_type: str
    price_class: PriceClass
    at_s: float = -math.inf
    usd_per_h: Decimal
    source: str
    as_of: str = ""

    @property
    def market(self) -> Market:
        """The market that the price holds in."""
        return Market(self.cloud, self.region, self.zone, self.instance_type, self.price_class)


_KINDS: dict[str, type[Record]] = {
    cls.kind: cls
    for cls in (
        NodeRequested, NodeUp, NodeReady, NodeNotice, NodeEnded, DiskEnded, NodeWorked, NodeEgress,
        NodeBilled, PricePoint,
    )
}  # fmt: skip


# --- records to dicts and back


def encode(record: Record) -> dict[str, Any]:
    """A record as the JSON-able dict that the journal holds; fields at their default are left out."""
    out: dict[str, Any] = {"type": "node", "kind": record.kind}
    for item in fields(record):
        value = getattr(record, item.name)
        if value != item.default:
            out[item.name] = str(value) if isinstance(value, Decimal) else value
    return out


def decode(raw: Mapping[str, Any]) -> Record:
    """A record from a dict; keys that the record does not have (the journal's own) are ignored.

    Raises DataError naming the field for a missing, mistyped or impossible value.
    """
    cls = _KINDS.get(raw.get("kind", ""))
    if cls is None:
        raise DataError(
            f"unknown node record {str(raw.get('kind'))[:40]!r}", hint="one of " + ", ".join(_KINDS)
        )
    values: dict[str, Any] = {}
    for name, convert in _CONVERTERS[cls].items():
        if name in raw:
            try:
                values[name] = convert(raw[name])
            except (ValueError, TypeError, InvalidOperation) as error:
                raise DataError(
                    f"node record {cls.kind!r}: {name} = {str(raw[name])[:60]!r}: {error}"
                ) from None
    try:
        return cls(**values)
    except TypeError as error:  # dataclass: "missing 1 required keyword-only argument: 'node'"
        raise DataError(f"node record {cls.kind!r}: {str(error).split(') ')[-1]}") from None


def _converters(cls: type[Record]) -> dict[str, Any]:
    by_type = {
        "float": utc_seconds, "float | None": float, "int": _count, "Decimal": amount, "bool": bool,
        "str": _text,
        "PriceClass": _choice("price_class"), "EndReason": _choice("reason"), "WorkKind": _choice("work"),
    }  # fmt: skip
    return {item.name: by_type[str(item.type)] for item in dataclasses.fields(cls)}


def utc_seconds(value: float | str) -> float:
    """UTC seconds from a number, or from ISO 8601 text, which must say its offset from UTC.

    Raises ValueError for NaN, for text that is no time, and for a local time without offset, which would be
    ambiguous for an hour every autumn.
    """
    if isinstance(value, str):
        when = datetime.fromisoformat(value)
        if when.tzinfo is None:
            raise ValueError("a time without an offset from UTC")
        return when.timestamp()
    if isinstance(value, bool) or math.isnan(value):
        raise ValueError("not a time")
    return float(value)


def amount(value: Any) -> Decimal:
    """A price or quantity: a finite decimal >= 0. Raises ValueError otherwise."""
    number = Decimal(str(value))
    if not number.is_finite() or number < 0:
        raise ValueError("must be a finite number >= 0")
    return number


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("must be a whole number >= 0")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("must be text")
    return value


def _choice(name: str) -> Any:
    def convert(value: Any) -> str:
        if value not in _CHOICES[name]:
            raise ValueError(f"must be one of {', '.join(_CHOICES[name])}")
        return str(value)

    return convert


_CONVERTERS = {cls: _converters(cls) for cls in _KINDS.values()}
