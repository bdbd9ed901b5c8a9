"""A budget that holds: stop while there is still money for the checkpoint.

What counts is not what was spent, but what it will have cost when the run has stopped at the next chance: all
machines run on until the checkpoint is written and the cloud has let them go. That is computed by the same
billing as the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from spotlight.core.billing import BillingRule, bill, rate_usd_per_h
from spotlight.core.ledger import Ledger
from spotlight.core.money import usd_of


@dataclass(frozen=True, slots=True)
class Forecast:
    """Where the money stands. `None`: no such limit, or nothing that runs."""

    spent_usd: Decimal
    usd_per_h: Decimal
    elapsed_h: float
    usd_left: Decimal | None
    hours_left: float | None  # until money or time is out, whichever comes first
    unpriced: tuple[str, ...]
    stop: bool
    reason: str

    def text(self) -> str:
        """One line for people: "$52.00 spent, at $8.00/h $48.00 and 6.0 h to go"."""
        line = f"${self.spent_usd:.2f} spent, at ${self.usd_per_h:.2f}/h"
        if self.usd_left is not None:
            line += f" ${self.usd_left:.2f}"
        if self.hours_left is not None:
            line += (" and" if self.usd_left is not None else "") + f" {self.hours_left:.1f} h"
        if self.usd_left is not None or self.hours_left is not None:
            line += " to go"
        if self.unpriced:
            line += f" ({len(self.unpriced)} without a known price)"
        return line


@dataclass(frozen=True, slots=True)
class BudgetGuard:
    """Limits of a run. `reserve_s`: a checkpoint and the end of all machines; `every_s`: between two checks.

    Raises ValueError for a limit that is not positive.
    """

    budget_usd: Decimal | None = None
    max_hours: float | None = None
    reserve_s: float = 300.0
    every_s: float = 30.0

    def __post_init__(self) -> None:
        if self.budget_usd is not None and not self.budget_usd > 0:
            raise ValueError(f"budget_usd must be above 0, not {self.budget_usd}")
        if self.max_hours is not None and not self.max_hours > 0:
            raise ValueError(f"max_hours must be above 0, not {self.max_hours}")

    def forecast(
        self, ledger: Ledger, rules: Mapping[str, BillingRule], now_s: float, started_s: float
    ) -> Forecast:
        """Decide at `now_s` whether the run, begun at `started_s` (UTC seconds), may go on to the next check."""
        so_far = bill(ledger, rules, now_s)
        at_stop = bill(ledger, rules, now_s + self.every_s + self.reserve_s)
        spent, rate = usd_of(so_far.units), rate_usd_per_h(ledger, rules, now_s)
        elapsed_h = max(0.0, now_s - started_s) / 3600.0
        usd_left = None if self.budget_usd is None else max(Decimal(0), self.budget_usd - spent)
        reason = self._reason(usd_of(at_stop.units), at_stop.unpriced, elapsed_h)
        return Forecast(
            spent_usd=spent,
            usd_per_h=rate,
            elapsed_h=elapsed_h,
            usd_left=usd_left,
            hours_left=self._hours_left(usd_left, rate, elapsed_h),
            unpriced=so_far.unpriced,
            stop=bool(reason),
            reason=reason,
        )

    def _reason(self, usd_at_stop: Decimal, unpriced: tuple[str, ...], elapsed_h: float) -> str:
        """Why the run must stop now, or ""."""
        if self.budget_usd is not None and unpriced:
            return f"no price is known for {unpriced[0]}: a budget of ${self.budget_usd} cannot be kept"
        if self.budget_usd is not None and usd_at_stop > self.budget_usd:
            return f"stopping at the next check would cost ${usd_at_stop:.2f} of ${self.budget_usd}"
        if self.max_hours is not None:
            hours_at_stop = elapsed_h + (self.every_s + self.reserve_s) / 3600.0
            if hours_at_stop > self.max_hours:
                return f"stopping at the next check would take {hours_at_stop:.2f} h of {self.max_hours} h"
        return ""

    def _hours_left(self, usd_left: Decimal | None, rate: Decimal, elapsed_h: float) -> float | None:
        limits = []
        if usd_left is not None and rate > 0:
            limits.append(float(usd_left / rate))
        if self.max_hours is not None:
            limits.append(max(0.0, self.max_hours - elapsed_h))
        return min(limits, default=None)
