"""The journal's records about money: machines asked for, up, ready, ended; prices; work; data sent.

They are written as things happen by whoever sees them (record type "node"), and read back into a
`core.ledger.Ledger`, which `core.billing` turns into money. Times are UTC seconds since the epoch, so neither
a time zone nor a daylight-saving change can move a bill; amounts are exact decimals in dollars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from spotlight.core.codec import Codec

PriceClass = Literal["on_demand", "spot", "reserved"]
EndReason = Literal["user", "interrupted", "stopped", "failed", "launch_failed", "unknown"]
WorkKind = Literal["useful", "lost"]

UtcS = Annotated[float, "seconds since the epoch; read from ISO 8601 text too"]
Count = Annotated[int, "at least 0"]
_END_OF_TIME_S = 1e12
OWN_SOURCE = "own"  # a beginning or an end that we saw ourselves; whatever a cloud's API says outranks it
STILL_RUNNING = "still running"  # the source of an end that is none yet: the machine is counted up to then


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
    launch: Count = 0
    at_s: UtcS
    cloud: str
    region: str = ""
    zone: str = ""
    instance_type: str
    gpus: Count
    price_class: PriceClass
    role: str = "explorer"
    disk_gb: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp(Record):
    """The machine exists: billing begins. The zone is the one that was got, not the one asked for.

    `source` is the cloud whose record says so, or "own" for when we saw it.
    """

    kind: ClassVar[str] = "up"
    node: str
    launch: Count = 0
    at_s: UtcS
    region: str = ""
    zone: str = ""
    instance_id: str = ""
    source: str = OWN_SOURCE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReady(Record):
    """The machine can take work: booting is over."""

    kind: ClassVar[str] = "ready"
    node: str
    launch: Count = 0
    at_s: UtcS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNotice(Record):
    """The cloud said that it will take the machine back."""

    kind: ClassVar[str] = "notice"
    node: str
    launch: Count = 0
    at_s: UtcS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnded(Record):
    """The machine runs no longer.

    `source` is the cloud's own code ("ec2:Server.SpotInstanceTermination"), or "own" for what we saw.
    `keeps_disk`: the disk is still there, and billed, until a `DiskEnded`.
    """

    kind: ClassVar[str] = "ended"
    node: str
    launch: Count = 0
    at_s: UtcS
    reason: EndReason
    source: str = OWN_SOURCE
    keeps_disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEnded(Record):
    """The disk that outlived its machine was deleted."""

    kind: ClassVar[str] = "disk_ended"
    node: str
    launch: Count = 0
    at_s: UtcS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorked(Record):
    """`gpus` of the node's GPUs worked from `start_s` to `at_s`; "lost" if the result was thrown away."""

    kind: ClassVar[str] = "worked"
    node: str
    launch: Count = 0
    start_s: UtcS
    at_s: UtcS
    gpus: Count = 1
    work: WorkKind = "useful"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEgress(Record):
    """Data that left the node over a path that is paid for."""

    kind: ClassVar[str] = "egress"
    node: str
    launch: Count = 0
    at_s: UtcS
    gb: Decimal
    usd_per_gb: Decimal
    path: str = "internet"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBilled(Record):
    """What the cloud's bill says the node cost in all: replaces our estimate."""

    kind: ClassVar[str] = "billed"
    node: str
    launch: Count = 0
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
    at_s: UtcS = -math.inf
    usd_per_h: Decimal
    source: str
    as_of: str = ""

    @property
    def market(self) -> Market:
        """The market that the price holds in."""
        return Market(self.cloud, self.region, self.zone, self.instance_type, self.price_class)


# --- records to dicts and back


def encode(record: Record) -> dict[str, Any]:
    """A record as the JSON-able dict that the journal holds; fields at their default are left out."""
    return {"type": "node", **_CODEC.encode(record)}


def decode(raw: Mapping[str, Any]) -> Record:
    """A record from a journal's line. Raises DataError naming the field for what cannot be."""
    record: Record = _CODEC.decode({key: value for key, value in raw.items() if key not in _JOURNAL_OWN})
    return record


def utc_seconds(value: float | str) -> float:
    """UTC seconds from a number, or from ISO 8601 text, which must say its offset from UTC.

    Raises ValueError for NaN and for what is tens of thousands of years away, for text that is no time, and
    for a local time without offset, which would be ambiguous for an hour every autumn.
    """
    if isinstance(value, str):
        when = datetime.fromisoformat(value)
        if when.tzinfo is None:
            raise ValueError("a time without an offset from UTC")
        return when.timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _END_OF_TIME_S:
        raise ValueError(f"not a time: {value!r}")
    return float(value)


def amount(value: Any) -> Decimal:
    """A price or quantity: a finite decimal >= 0. Raises ValueError otherwise."""
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"not a number: {str(value)[:60]!r}") from None
    if not number.is_finite() or number < 0:
        raise ValueError(f"must be a finite number >= 0, got {number}")
    return number


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"must be a whole number >= 0, got {str(value)[:60]!r}")
    return value


_JOURNAL_OWN = ("type", "v", "seq", "utc")
_CODEC = Codec(
    NodeRequested, NodeUp, NodeReady, NodeNotice, NodeEnded, DiskEnded, NodeWorked, NodeEgress, NodeBilled,
    PricePoint,
    what="node record",
    tag="kind",
    name=lambda cls: str(cls.kind),  # type: ignore[attr-defined]
    types={UtcS: (None, utc_seconds), Count: (None, _count), Decimal: (str, amount)},
)  # fmt: skip
