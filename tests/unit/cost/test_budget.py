"""The budget holds: whatever the run does between two checks, the bill after the stop is within it."""

from __future__ import annotations

from decimal import Decimal

import ledgers
import pytest

from spotlight.core import billing
from spotlight.core.budget import BudgetGuard
from spotlight.core.money import usd_of

START = "2026-03-02T10:00:00Z"
START_S = ledgers.utc(START)
HOUR = 3600.0


def running(usd="8", **more):
    return ledgers.ledger({"prices": [["always", usd]], "up": START, **more})


def forecast(guard, hours, ledger=None):
    return guard.forecast(ledger or running(), ledgers.RULES, START_S + hours * HOUR, START_S)


def test_forecast_in_words():
    said = forecast(BudgetGuard(budget_usd=Decimal(100), max_hours=20), 6.5)
    assert said.text() == "$52.00 spent, at $8.00/h $48.00 and 6.0 h to go"
    assert not said.stop


def test_hours_bind_before_money():
    said = forecast(BudgetGuard(budget_usd=Decimal(1000), max_hours=8), 6.5)
    assert said.hours_left == pytest.approx(1.5)


def test_without_limits_it_only_tells():
    said = forecast(BudgetGuard(), 6.5)
    assert (said.usd_left, said.hours_left, said.stop) == (None, None, False)
    assert said.text() == "$52.00 spent, at $8.00/h"


@pytest.mark.parametrize("usd", ["8", "55.04", "0.93", "440"])
def test_the_line_is_never_crossed(usd):
    """Check every 30 s; stop when told; the machines live on for the whole reserve; then add up the bill."""
    guard = BudgetGuard(budget_usd=Decimal(20), reserve_s=300, every_s=30)
    ledger, now_s = running(usd), START_S
    while not guard.forecast(ledger, ledgers.RULES, now_s, START_S).stop:
        now_s += guard.every_s
    ended = ledgers.ledger(
        {"prices": [["always", usd]], "up": START},
        more=[{"kind": "ended", "node": "n0", "at_s": now_s + guard.reserve_s, "reason": "user"}],
    )
    total = usd_of(billing.bill(ended, ledgers.RULES, now_s + HOUR).units)
    if now_s > START_S:  # a machine that costs more than the budget in one reserve is stopped at once
        assert total <= 20
        # and not much earlier than it must: one more round would have crossed it
        assert total + Decimal(usd) * 60 / 3600 > 20


def test_it_stops_for_hours_with_the_reserve_in_hand():
    guard = BudgetGuard(max_hours=2, reserve_s=300, every_s=60)
    assert not forecast(guard, 1.89).stop
    said = forecast(guard, 1.91)
    assert said.stop
    assert "2.01 h of 2 h" in said.reason


def test_a_budget_is_not_kept_blindly():
    ledger = running(type="p9.unknown", prices=[])
    said = forecast(BudgetGuard(budget_usd=Decimal(100)), 1, ledger)
    assert said.stop
    assert "no price is known for n0" in said.reason
    assert "(1 without a known price)" in said.text()
    assert not forecast(BudgetGuard(max_hours=5), 1, ledger).stop


def test_a_forgiven_hour_is_not_counted_on():
    """EC2 may forgive the first hour of what it takes; until it does, the money counts as spent."""
    said = forecast(BudgetGuard(budget_usd=Decimal(5)), 0.6)
    assert said.spent_usd == Decimal("4.8")
    assert said.stop


def test_a_kept_disk_goes_on_costing():
    ledger = running(ended="2026-03-02T11:00:00Z", reason="stopped", keeps_disk=True, disk_gb=365)
    said = forecast(BudgetGuard(budget_usd=Decimal(10)), 11, ledger)
    assert said.usd_per_h == Decimal("0.04")
    assert said.spent_usd == Decimal("8.44")


@pytest.mark.parametrize(
    "limits", [{"budget_usd": Decimal(0)}, {"budget_usd": Decimal(-1)}, {"max_hours": 0}]
)
def test_limits_must_be_positive(limits):
    with pytest.raises(ValueError, match="above 0"):
        BudgetGuard(**limits)
