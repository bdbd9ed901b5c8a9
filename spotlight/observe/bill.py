"""From ledgers and scores to a cost report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, TypeGuard

from spotlight.core.billing import PHASES, Bill, BillingRule, Charge, bill, saving
from spotlight.core.cost import OWN_SOURCE, STILL_RUNNING, Market, PriceClass, PricePoint
from spotlight.core.ledger import Ledger, name
from spotlight.core.money import MS_PER_H, usd_of
from spotlight.observe.cost_report import By, CostReport, Line, PriceUsed, ScoreCost

GPUS_PER_MACHINE = 8  # of the machine that own ones are compared with
_POINT = Decimal("0.01")  # "$ per +0.01 of score"


@dataclass(frozen=True, slots=True)
class RunCost:
    """What is read of one run: its ledger and its held-out scores as (UTC seconds, score), in time order."""

    name: str
    ledger: Ledger
    scores: tuple[tuple[float, float], ...] = ()


def build(
    runs: Sequence[RunCost],
    rules: Mapping[str, BillingRule],
    now_s: float,
    *,
    since_s: float = -math.inf,
    by: By = "price-class",
    target: float | None = None,
    rented: Mapping[PriceClass, PricePoint] | None = None,
) -> CostReport:
    """The report of one or more runs for the time from `since_s` to `now_s` (UTC seconds).

    `$ per +0.01` and `$ to target` look at the whole run, whatever `since_s` is. `rented`: prices of the
    8-GPU machine that own machines are compared with.
    """
    bills = [(run, bill(run.ledger, rules, now_s, since_s=since_s)) for run in runs]
    charges = [(run.name, charge) for run, its in bills for charge in its.charges]
    savings = [(run, saving(run.ledger, rules, now_s, since_s)) for run in runs]
    many = len(runs) > 1
    spot = sum(charge.units for _, charge in charges if charge.price_class == "spot")
    total = sum(charge.units for _, charge in charges)
    billed = [(run, item) for run in runs for item in run.ledger.intervals if item.up_s is not None]
    return CostReport(
        runs=tuple(run.name for run in runs),
        at_s=now_s,
        since_s=since_s if math.isfinite(since_s) else None,
        by=by,
        lines=_lines(charges, by, many),
        units=total,
        spot_units=spot,
        on_demand_units=total - spot,
        phases={phase: sum(c.units for _, c in charges if c.phase == phase) for phase in PHASES},
        saved_units=sum(s.on_demand_units - s.spot_units for _, s in savings),
        saved_unknown=_qualified(((run, s.unknown) for run, s in savings), many),
        counterfactual_units=sum(s.on_demand_units for _, s in savings),
        scores=tuple(_score(run, rules, now_s, target) for run in runs if len(run.scores) > 1),
        target=target,
        failed_launches=len({(run, c.key) for run, c in charges if c.phase == "failed"}),
        machines=len(billed),
        reconciled=sum(item.key in run.ledger.billed for run, item in billed),
        rented_units=_rented(runs, rented, rules, now_s),
        unpriced=_qualified(((run, its.unpriced) for run, its in bills), many),
        prices=_prices_used(runs),
        notes=_notes(runs, rules),
    )


def what_if(
    ledger: Ledger,
    prices: Mapping[PriceClass, PricePoint],
    gpus_per_machine: int,
    rules: Mapping[str, BillingRule],
    now_s: float,
) -> Bill:
    """What the user's own machines in a ledger would have cost as parts of a rented one.

    Every interval keeps its times, end reasons and work; each of its GPUs is billed as one of the
    `gpus_per_machine` of the machine that `prices` are for, under the rules of that machine's cloud.
    """
    points: dict[Market, tuple[PricePoint, ...]] = {}
    intervals = []
    for item in ledger.intervals:
        if item.cloud not in rules or not rules[item.cloud].own:
            continue
        price = prices.get(item.price_class, prices["on_demand"])
        gpus = max(1, item.gpus)
        share = replace(
            price,
            instance_type=f"{gpus}/{gpus_per_machine} {price.instance_type}",
            usd_per_h=price.usd_per_h * gpus / gpus_per_machine,
        )
        points[share.market] = (share,)
        intervals.append(
            replace(
                item,
                cloud=price.cloud,
                region=price.region,
                zone=price.zone,
                price_class=price.price_class,  # without a price for spot all is on demand
                instance_type=share.instance_type,
                disk_gb=Decimal(0),
            )
        )
    rented = replace(ledger, intervals=tuple(intervals), prices=points, billed={}, egress={})
    return bill(rented, rules, now_s)


def scores_of(rows: Iterable[Mapping[str, Any]]) -> tuple[tuple[float, float], ...]:
    """The held-out scores among metric records, in time order; rows without a finite one are passed over."""
    found = [(row.get("at_s"), row.get("score")) for row in rows if row.get("kind") == "eval"]
    return tuple(sorted((at_s, score) for at_s, score in found if _finite(at_s) and _finite(score)))


# --- parts


def _lines(charges: Sequence[tuple[str, Charge]], by: By, many: bool) -> tuple[Line, ...]:
    units: Counter[str] = Counter()
    gpu_ms: Counter[str] = Counter()
    unknown: set[str] = set()
    for run, charge in charges:
        label = _label(run, charge, by, many)
        units[label] += charge.units
        gpu_ms[label] += charge.gpu_ms
        if not charge.known:
            unknown.add(label)
    order = list(PHASES) if by == "phase" else sorted(units, key=lambda label: (-units[label], label))
    return tuple(
        Line(label, units[label], gpu_ms[label] / MS_PER_H, label in unknown)
        for label in order
        if label in units
    )


def _label(run: str, charge: Charge, by: By, many: bool) -> str:
    match by:
        case "run":
            return run
        case "node":
            return f"{run}/{name(charge.key)}" if many else name(charge.key)
        case "price-class":
            return charge.price_class.replace("_", "-")
        case "role":
            return charge.role
        case "zone":
            return charge.zone
        case "phase":
            return charge.phase


def _score(run: RunCost, rules: Mapping[str, BillingRule], now_s: float, target: float | None) -> ScoreCost:
    """Price the gain from the first to the last score by all that was paid up to the last."""
    (_, first), (last_s, last) = run.scores[0], run.scores[-1]
    paid = usd_of(bill(run.ledger, rules, now_s, until_s=last_s).units)
    points = Decimal(str(last - first)) / _POINT
    reached_s = next((at_s for at_s, score in run.scores if target is not None and score >= target), None)
    to_target = None
    if reached_s is not None:
        to_target = usd_of(bill(run.ledger, rules, now_s, until_s=reached_s).units)
    return ScoreCost(run.name, first, last, paid / points if points > 0 else None, to_target)


def _rented(
    runs: Sequence[RunCost],
    prices: Mapping[PriceClass, PricePoint] | None,
    rules: Mapping[str, BillingRule],
    now_s: float,
) -> int | None:
    """What own machines would have cost; None if there were none, or no price to compare with."""
    own = [run for run in runs if any(rules[i.cloud].own for i in run.ledger.intervals if i.cloud in rules)]
    if not prices or not own:
        return None
    return sum(what_if(run.ledger, prices, GPUS_PER_MACHINE, rules, now_s).units for run in own)


def _prices_used(runs: Sequence[RunCost]) -> tuple[PriceUsed, ...]:
    first_up: dict[Market, float] = {}
    series: dict[Market, tuple[PricePoint, ...]] = {}
    for run in runs:
        for item in run.ledger.intervals:
            points = run.ledger.series(item.market())
            if points and item.up_s is not None:
                market = points[0].market
                series[market] = points
                first_up[market] = min(item.up_s, first_up.get(market, math.inf))
    return tuple(
        PriceUsed(
            market, points[-1].usd_per_h, points[-1].source, points[-1].as_of, len(points) - 1,
            assumed=points[0].at_s > first_up[market],
        )
        for market, points in sorted(series.items())
    )  # fmt: skip


def _notes(runs: Sequence[RunCost], rules: Mapping[str, BillingRule]) -> tuple[str, ...]:
    """What a reader should know before believing the total."""
    notes: dict[str, None] = {}
    for run in runs:
        if not run.ledger.intervals and not run.ledger.warnings:
            notes[f"{run.name}: no machine was recorded"] = None
        for warning in run.ledger.warnings:
            notes[f"{run.name}: {warning}"] = None
        rented = [
            i
            for i in run.ledger.intervals
            if i.up_s is not None and not (i.cloud in rules and rules[i.cloud].own)
        ]
        ours = [name(i.key) for i in rented if i.end_source == OWN_SOURCE]
        if ours:
            notes[
                f"{run.name}: {len(ours)} ends are as the run saw them, not the cloud's record: {ours[0]}"
            ] = None
        unseen = [
            name(i.key)
            for i in run.ledger.intervals
            if i.up_s is not None and (i.ended_s is None or i.end_source == STILL_RUNNING)
        ]
        if unseen:
            notes[
                f"{run.name}: {len(unseen)} machines run still, or their end was not recorded: {unseen[0]}"
            ] = None
        for cloud in {item.cloud for item in run.ledger.intervals}:
            if cloud not in rules:
                notes[f"no billing rule is known for {cloud}: per second, without a minimum"] = None
            elif "[unconfirmed]" in rules[cloud].source:
                notes[f"the billing rule of {cloud} is unconfirmed"] = None
    return tuple(notes)


def _qualified(named: Iterable[tuple[RunCost, Iterable[str]]], many: bool) -> tuple[str, ...]:
    return tuple(f"{run.name}/{item}" if many else item for run, items in named for item in items)


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
