"""The cost report as a value: what was paid, for what, and what is and is not known about it.

Amounts are exact (units of `core.money`) until shown; lines are rounded together, so that they add up
to the total that is shown with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

from spotlight.core.cost import Market
from spotlight.core.money import UNITS_PER_USD, apportion, cents, usd_of

By = Literal["price-class", "role", "zone", "phase", "node", "run"]
GROUPINGS: tuple[By, ...] = ("price-class", "role", "zone", "phase", "node", "run")
NOT_INCLUDED = (
    "object storage and its requests",
    "public IP addresses and NAT",
    "traffic that no record tells of",
    "taxes, credits, committed-use and enterprise discounts",
)
_MICRO = UNITS_PER_USD // 10**6


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report. `unknown`: part of it has no known price, so the amount is a lower bound."""

    name: str
    units: int
    gpu_hours: float
    unknown: bool


@dataclass(frozen=True, slots=True)
class ScoreCost:
    """What a run paid for its held-out score. None: no gain, or the target was not reached."""

    run: str
    first: float
    last: float
    usd_per_point: Decimal | None
    usd_to_target: Decimal | None


@dataclass(frozen=True, slots=True)
class PriceUsed:
    """A price that the report rests on. `assumed`: it was first seen after a machine had started."""

    market: Market
    usd_per_h: Decimal
    source: str
    as_of: str
    changes: int
    assumed: bool


@dataclass(frozen=True, slots=True)
class CostReport:
    """The whole report at `at_s`. Units as in `core.money`; `lines` and `phases` each add up to `units`.

    `rented_units`: what the machines that were the user's own would have cost (see `bill.what_if`).
    """

    runs: tuple[str, ...]
    at_s: float
    since_s: float | None
    by: By
    lines: tuple[Line, ...]
    units: int
    spot_units: int
    on_demand_units: int
    phases: Mapping[str, int]
    saved_units: int
    saved_unknown: tuple[str, ...]
    counterfactual_units: int
    scores: tuple[ScoreCost, ...]
    target: float | None
    failed_launches: int
    machines: int
    reconciled: int
    rented_units: int | None
    unpriced: tuple[str, ...]
    prices: tuple[PriceUsed, ...]
    notes: tuple[str, ...]

    @property
    def estimate(self) -> bool:
        """Whether any amount is ours rather than the cloud's bill."""
        return self.reconciled < self.machines

    @property
    def not_included(self) -> tuple[str, ...]:
        """What no ledger knows of."""
        return NOT_INCLUDED

    @property
    def total_usd(self) -> Decimal:
        """The total to the cent."""
        return sum(self.line_usd, Decimal("0.00"))

    @property
    def line_usd(self) -> list[Decimal]:
        """Each line's amount to the cent, adding up to `total_usd`."""
        return cents([line.units for line in self.lines])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`; dollars to the micro-dollar, lines adding up to the total."""
        amounts = apportion([line.units for line in self.lines], _MICRO)
        phases = apportion(list(self.phases.values()), _MICRO)
        return {
            "runs": list(self.runs),
            "at": _iso(self.at_s),
            "since": None if self.since_s is None else _iso(self.since_s),
            "by": self.by,
            "lines": [
                {
                    "name": line.name,
                    "usd": usd / 10**6,
                    "gpu_hours": round(line.gpu_hours, 6),
                    "lower_bound": line.unknown,
                }
                for line, usd in zip(self.lines, amounts, strict=True)
            ],
            "total_usd": sum(amounts) / 10**6,
            "lower_bound": bool(self.unpriced),
            "spot_usd": float(usd_of(self.spot_units)),
            "on_demand_usd": float(usd_of(self.on_demand_units)),
            "phases_usd": {phase: usd / 10**6 for phase, usd in zip(self.phases, phases, strict=True)},
            "saved_usd": float(usd_of(self.saved_units)),
            "spot_hours_on_demand_usd": float(usd_of(self.counterfactual_units)),
            "saved_unknown": list(self.saved_unknown),
            "scores": [
                {
                    "run": score.run,
                    "first": score.first,
                    "last": score.last,
                    "usd_per_point": _number(score.usd_per_point),
                    "usd_to_target": _number(score.usd_to_target),
                }
                for score in self.scores
            ],
            "target": self.target,
            "failed_launches": self.failed_launches,
            "machines": self.machines,
            "reconciled": self.reconciled,
            "estimate": self.estimate,
            "own_machines_on_h100_usd": None
            if self.rented_units is None
            else float(usd_of(self.rented_units)),
            "unpriced": list(self.unpriced),
            "prices": [
                {
                    **used.market._asdict(),
                    "usd_per_h": float(used.usd_per_h),
                    "source": used.source,
                    "as_of": used.as_of,
                    "changes": used.changes,
                    "assumed": used.assumed,
                }
                for used in self.prices
            ],
            "notes": list(self.notes),
            "not_included": list(NOT_INCLUDED),
        }


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def _number(value: Decimal | None) -> float | None:
    return None if value is None else round(float(value), 6)
