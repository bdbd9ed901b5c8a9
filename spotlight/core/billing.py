"""What a ledger costs: pure, exact, additive.

A machine's charge is a cumulative function of time (`money.Meter`); what a stretch costs is the difference of
two of its values, so splits of time add up by construction and nothing can be negative.

How a cloud rounds, what it charges at least and what it forgives is data (`BillingRule`), not code.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, NamedTuple

from spotlight.core.cost import NodeWorked, PriceClass, PricePoint
from spotlight.core.ledger import Interval, Ledger, NodeKey, name
from spotlight.core.money import Meter, to_ms, to_nano, units_of, usd_of

HOURS_PER_MONTH = 730  # 365 * 24 / 12; clouds quote disks per month and bill them per second or hour

Phase = Literal[
    "boot", "useful", "idle", "lost", "failed", "controller", "unattributed", "rounding", "disk", "egress"
]
PHASES: tuple[Phase, ...] = (
    "useful", "lost", "idle", "boot", "failed", "controller", "unattributed", "rounding", "disk", "egress",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BillingRule:
    """How one cloud turns hours into money. `source` says where the rule is written down."""

    cloud: str
    granularity_s: int = 1
    minimum_s: int = 0
    free_if_interrupted_within_s: int = 0  # spot only, and only if the cloud took the machine
    price: Literal["in_effect", "at_start"] = "in_effect"
    disk_usd_per_gb_month: Decimal | None = None
    own: bool = False  # the user's own hardware: nothing is charged
    source: str = ""

    def billed_ms(self, length_ms: int) -> int:
        """The length that is charged for: rounded up to the granularity, at least the minimum."""
        step = max(1, self.granularity_s * 1000)
        return max(-(-length_ms // step) * step, self.minimum_s * 1000)


class Charge(NamedTuple):
    """One cell of the bill: a machine and a phase. `known` is false where no price is known (units = 0)."""

    key: NodeKey
    role: str
    price_class: PriceClass
    zone: str
    phase: Phase
    units: int
    gpu_ms: int
    known: bool


@dataclass(frozen=True, slots=True)
class Bill:
    """All charges in a window of time, and the machines or disks that no price is known for."""

    charges: tuple[Charge, ...]
    unpriced: tuple[str, ...]

    @property
    def units(self) -> int:
        """The total, as far as prices are known."""
        return sum(charge.units for charge in self.charges)


@dataclass(frozen=True, slots=True)
class Saving:
    """What spot machines cost, and what the same machine-hours would have cost on demand."""

    spot_units: int
    on_demand_units: int
    unknown: tuple[str, ...]  # left out of both: one of the two prices is not known


def bill(
    ledger: Ledger,
    rules: Mapping[str, BillingRule],
    now_s: float,
    *,
    since_s: float = -math.inf,
    until_s: float = math.inf,
) -> Bill:
    """Charge every interval of the ledger for its part inside [since_s, until_s), as known at `now_s`.

    A machine that runs still is charged up to `now_s`. Times in UTC seconds.
    """
    window = to_ms(since_s), to_ms(until_s)
    attributed = bool(ledger.work)
    charges: list[Charge] = []
    unpriced: list[str] = []
    for item in ledger.intervals:
        rule = rules.get(item.cloud) or BillingRule(item.cloud)
        for phase, units, gpu_ms in _node(item, ledger, rule, to_ms(now_s), window, attributed):
            known = units is not None
            if not known:
                unpriced.append(name(item.key) + (" (disk)" if phase == "disk" else ""))
            charges.append(_charge(item, phase, units or 0, gpu_ms, known))
    return Bill(tuple(charges), tuple(dict.fromkeys(unpriced)))


def saving(
    ledger: Ledger, rules: Mapping[str, BillingRule], now_s: float, since_s: float = -math.inf
) -> Saving:
    """Compare the spot machines with the same hours on demand; disks and egress would be the same.

    Hours that a cloud forgave count too: on demand they would have been paid for.
    """
    spot = on_demand = 0
    unknown: list[str] = []
    for item in ledger.intervals:
        rule = rules.get(item.cloud) or BillingRule(item.cloud)
        if item.price_class != "spot" or item.up_s is None or rule.own:
            continue
        paid = _compute_meter(item, ledger, rule, to_ms(now_s), item.price_class)
        full = _compute_meter(item, ledger, rule, to_ms(now_s), "on_demand")
        if paid is None or full is None:
            unknown.append(name(item.key))
            continue
        spot += paid.between(to_ms(since_s), paid.end_ms)
        on_demand += full.between(to_ms(since_s), full.end_ms)
    return Saving(spot, on_demand, tuple(unknown))


def rate_usd_per_h(ledger: Ledger, rules: Mapping[str, BillingRule], now_s: float) -> Decimal:
    """Dollars per hour that the machines and disks that exist at `now_s` cost, as far as prices are known."""
    hour_ahead = bill(ledger, rules, now_s + 3600.0, since_s=now_s, until_s=now_s + 3600.0)
    return usd_of(hour_ahead.units)


# --- one machine


def _node(
    item: Interval, ledger: Ledger, rule: BillingRule, now_ms: int, window: tuple[int, int], attributed: bool
) -> Iterator[tuple[Phase, int | None, int]]:
    """(phase, units or None if no price is known, GPU-milliseconds) of a machine, its disk, its egress."""
    if item.up_s is not None:
        compute, disk = _meters(item, ledger, rule, now_ms)
        clock = compute or Meter(to_ms(item.up_s), to_ms(item.up_s) + _billed(item, rule, now_ms), [(0, 0)])
        for phase, units, gpu_ms in _phases(item, ledger, clock, now_ms, window, attributed):
            yield phase, units if compute else None, gpu_ms
        if item.disk_gb and not rule.own:
            yield "disk", disk.between(*window) if disk else None, 0
    elif item.ended_s is not None and window[0] <= to_ms(item.ended_s) < window[1]:
        # A launch that made no machine: a line of its own, at nothing.
        actual = ledger.billed.get(item.key)
        yield "failed", units_of(actual.usd) if actual else 0, 0
    for sent in ledger.egress.get(item.key, ()):
        if window[0] <= to_ms(sent.at_s) < window[1]:
            yield "egress", units_of(sent.gb * sent.usd_per_gb), 0


def _meters(
    item: Interval, ledger: Ledger, rule: BillingRule, now_ms: int
) -> tuple[Meter | None, Meter | None]:
    """Meters of a machine and its disk, scaled to the cloud's bill where there is one."""
    compute = _compute_meter(item, ledger, rule, now_ms, item.price_class)
    disk = _disk_meter(item, rule, now_ms)
    actual = ledger.billed.get(item.key)
    if actual is None:
        return compute, disk
    start = to_ms(item.up_s or 0.0)
    estimate = sum(meter.until(meter.end_ms) for meter in (compute, disk) if meter)
    if not estimate:  # no price, or forgiven by our rule but not by the bill: spread it evenly
        end = start + max(1, _billed(item, rule, now_ms))
        compute, disk, estimate = (
            Meter(start, end, [(start, 1)]),
            Meter(start, end, [(start, 0)]),
            end - start,
        )
    scale = units_of(actual.usd), estimate
    return compute and compute.scaled(scale), disk and disk.scaled(scale)


def _phases(
    item: Interval, ledger: Ledger, meter: Meter, now_ms: int, window: tuple[int, int], attributed: bool
) -> Iterator[tuple[Phase, int, int]]:
    """Split a machine's billed time: boot, then work / lost work / idle, then what the cloud rounds up."""
    start, end = meter.start_ms, max(meter.start_ms, _end_ms(item, now_ms))
    ready = end if item.ready_s is None else min(max(start, to_ms(item.ready_s)), end)
    low, high = window

    def stretch(phase: Phase, a: int, b: int) -> Iterator[tuple[Phase, int, int]]:
        a, b = max(a, low), min(b, high)
        if b > a:
            yield phase, meter.between(a, b), (b - a) * max(1, item.gpus)

    dead_on_arrival = item.ready_s is None and item.ended_s is not None
    yield from stretch("failed" if dead_on_arrival else "boot", start, ready)
    if item.role == "head":
        yield from stretch("controller", ready, end)
    elif not attributed:
        yield from stretch("unattributed", ready, end)
    else:
        yield from _serving(item, ledger.work.get(item.key, ()), meter, max(ready, low), min(end, high))
    yield from stretch("rounding", end, meter.end_ms)


def _serving(
    item: Interval, work: Iterable[NodeWorked], meter: Meter, low: int, high: int
) -> Iterator[tuple[Phase, int, int]]:
    """Sweep over the work records: each slice of time is shared out by the GPUs that were busy in it."""
    if high <= low:
        return
    gpus = max(1, item.gpus)
    edges: list[tuple[int, int, int]] = [(high, 0, 0)]
    for record in work:
        a, b = max(low, to_ms(record.start_s)), min(high, to_ms(record.at_s))
        if b > a:
            kind = 0 if record.work == "useful" else 1
            edges += [(a, kind, record.gpus), (b, kind, -record.gpus)]
    edges.sort()
    busy, units, gpu_ms = [0, 0], [0, 0], [0, 0]
    at, charged = low, meter.until(low)
    for edge, kind, change in edges:
        if edge > at:
            total = meter.until(edge)
            # Records that overlap (a request run twice) cannot make more GPUs than the machine has.
            useful = min(busy[0], gpus)
            for i, share in enumerate((useful, min(busy[1], gpus - useful))):
                units[i] += (total - charged) * share // gpus
                gpu_ms[i] += (edge - at) * share
            at, charged = edge, total
        busy[kind] += change
    yield "useful", units[0], gpu_ms[0]
    yield "lost", units[1], gpu_ms[1]
    yield "idle", meter.between(low, high) - sum(units), (high - low) * gpus - sum(gpu_ms)


def _disk_meter(item: Interval, rule: BillingRule, now_ms: int) -> Meter | None:
    """A disk lives with its machine, or beyond it when it is kept; None if no price is known."""
    if rule.disk_usd_per_gb_month is None or item.up_s is None:
        return None
    start = to_ms(item.up_s)
    end = _end_ms(item, now_ms)
    if item.disk_ended_s is not None:
        end = max(end, to_ms(item.disk_ended_s))
    elif item.keeps_disk:
        end = max(end, now_ms)
    hourly = to_nano(rule.disk_usd_per_gb_month * item.disk_gb / HOURS_PER_MONTH)
    return Meter(start, start + rule.billed_ms(max(0, end - start)), [(start, hourly)])


def _compute_meter(
    item: Interval, ledger: Ledger, rule: BillingRule, now_ms: int, price_class: PriceClass
) -> Meter | None:
    """The meter of a machine in a price class; None if no price is known."""
    assert item.up_s is not None
    start = to_ms(item.up_s)
    end = start + _billed(item, rule, now_ms)
    if rule.own or _forgiven(item, rule, price_class):
        return Meter(start, end, [(start, 0)])
    prices = _prices(ledger.series(item.market(price_class)), rule, start)
    return Meter(start, end, prices) if prices else None


def _prices(series: Sequence[PricePoint], rule: BillingRule, start_ms: int) -> list[tuple[int, int]]:
    """Price steps as integers. Before the first known point, the first point's price is taken."""
    steps = [(to_ms(point.at_s), to_nano(point.usd_per_h)) for point in series]
    if rule.price == "at_start" and steps:
        return [steps[max(0, bisect_right([at for at, _ in steps], start_ms) - 1)]]
    return steps


def _forgiven(item: Interval, rule: BillingRule, price_class: PriceClass) -> bool:
    """Whether the cloud charges nothing because it took the machine back so early."""
    return (
        price_class == "spot"
        and item.end_reason == "interrupted"
        and item.ended_s is not None
        and item.up_s is not None
        and item.ended_s - item.up_s < rule.free_if_interrupted_within_s
    )


def _billed(item: Interval, rule: BillingRule, now_ms: int) -> int:
    return rule.billed_ms(max(0, _end_ms(item, now_ms) - to_ms(item.up_s or 0.0)))


def _end_ms(item: Interval, now_ms: int) -> int:
    return now_ms if item.ended_s is None else to_ms(item.ended_s)


def _charge(item: Interval, phase: Phase, units: int, gpu_ms: int, known: bool) -> Charge:
    zone = "/".join(part for part in (item.cloud, item.zone or item.region) if part)
    return Charge(item.key, item.role, item.price_class, zone, phase, units, gpu_ms, known)
