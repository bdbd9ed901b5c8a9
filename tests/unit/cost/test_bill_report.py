"""The report: every grouping adds up to the same total; savings, score and what-if by hand."""

from __future__ import annotations

import math
from decimal import Decimal

import ledgers
import pytest

from spotlight.core.cost import STILL_RUNNING
from spotlight.core.ledger import Ledger
from spotlight.core.money import usd_of
from spotlight.observe import bill
from spotlight.observe.bill import RunCost
from spotlight.observe.cost_report import GROUPINGS
from spotlight.provision import prices

T0 = "2026-03-02T10:00:00Z"
T0_S = ledgers.utc(T0)
NOW_S = ledgers.utc("2026-03-03T00:00:00Z")
HOUR = 3600.0


def mixed():
    """A trainer on demand for 2 h (110.08), two spot explorers, one taken and free; a failed launch."""
    return ledgers.ledger(
        {"node": "od", "class": "on_demand", "prices": [["always", "55.04"]], "role": "trainer", "up": T0,
         "ready": "2026-03-02T10:06:00Z", "ended": "2026-03-02T12:00:00Z"},
        {"node": "s0", "prices": [["always", "15"]], "on_demand": "55.04", "zone": "z1", "up": T0,
         "ready": "2026-03-02T10:06:00Z", "ended": "2026-03-02T12:00:00Z", "disk_gb": 365},
        {"node": "s1", "prices": [["always", "15"]], "up": T0, "ended": "2026-03-02T10:30:00Z",
         "reason": "interrupted"},
        {"node": "s2", "prices": [["always", "15"]], "requested": T0, "ended": T0, "reason": "launch_failed"},
        more=[{"kind": "worked", "node": "s0", "start_s": "2026-03-02T11:00:00Z",
               "at_s": "2026-03-02T12:00:00Z", "gpus": 8}],
    )  # fmt: skip


def report(ledger=None, scores=(), **kwargs):
    run = RunCost("r1", mixed() if ledger is None else ledger, tuple(scores))
    return bill.build([run], ledgers.RULES, NOW_S, **kwargs)


@pytest.mark.parametrize("by", GROUPINGS)
def test_every_grouping_adds_up_to_the_total(by):
    """110.08 + 2 x 15 + 2 x 0.04 = 140.16."""
    found = report(by=by)
    assert sum(line.units for line in found.lines) == found.units
    assert sum(found.line_usd) == found.total_usd == Decimal("140.16")
    assert sum(line["usd"] for line in found.to_dict()["lines"]) == pytest.approx(140.16, abs=1e-9)


def test_spot_and_on_demand_and_phases_add_up_too():
    found = report()
    assert found.spot_units + found.on_demand_units == found.units == sum(found.phases.values())
    assert usd_of(found.on_demand_units) == Decimal("110.08")


def test_savings_count_the_free_hours_of_taken_machines():
    """s0: 2 h x (55.04 - 15) = 80.08; s1: 0.5 h x 55.04 = 27.52, of which nothing was paid."""
    found = report()
    assert usd_of(found.saved_units) == Decimal("107.60")
    assert usd_of(found.counterfactual_units) == Decimal("137.60")


def test_failed_launches_are_counted():
    assert report().failed_launches == 2  # s1 was taken while booting; s2 never came


def test_zones_name_their_cloud():
    assert {line.name for line in report(by="zone").lines} == {"aws/a", "aws/z1"}


def test_lines_of_phases_stand_in_their_own_order():
    names = [line.name for line in report(by="phase").lines]
    assert names == ["useful", "lost", "idle", "boot", "failed", "disk"]


def test_score_gain_is_priced_by_what_was_paid_up_to_the_last_score():
    """Until 11:00: 55.04 + 15 + 0.04 = 70.08 for 0.24 of score: 2.92 a point; at 10:30, with 0.6: 35.04."""
    scores = [(T0_S, 0.50), (T0_S + HOUR / 2, 0.62), (T0_S + HOUR, 0.74)]
    (score,) = report(scores=scores, target=0.6).scores
    assert (score.first, score.last) == (0.50, 0.74)
    assert score.usd_per_point == Decimal("2.92")
    assert score.usd_to_target == Decimal("35.04")


def test_no_gain_and_no_target_are_said_not_divided():
    scores = [(T0_S, 0.5), (T0_S + HOUR, 0.5)]
    (score,) = report(scores=scores, target=0.9).scores
    assert (score.usd_per_point, score.usd_to_target) == (None, None)


def test_a_run_without_steps_has_a_report():
    found = report(Ledger())
    assert (found.units, found.lines, found.scores) == (0, (), ())
    assert found.notes == ("r1: no machine was recorded",)
    assert found.to_dict()["total_usd"] == 0


def test_an_unknown_price_makes_the_total_a_lower_bound():
    ledger = ledgers.ledger(
        {"up": T0, "ended": "2026-03-02T11:00:00Z"},
        {"up": T0, "ended": "2026-03-02T11:00:00Z", "type": "p9", "prices": [], "class": "on_demand"},
    )
    found = report(ledger)
    assert found.unpriced == ("n1",)
    assert {line.name: line.unknown for line in found.lines} == {"spot": False, "on-demand": True}
    document = found.to_dict()
    assert document["lower_bound"]
    assert document["saved_unknown"] == ["n0"]


def test_estimates_are_marked_until_every_machine_is_billed():
    assert report().estimate
    ledger = ledgers.ledger(
        {"up": T0, "ended": "2026-03-02T11:00:00Z"},
        more=[{"kind": "billed", "node": "n0", "usd": "14.99", "source": "invoice"}],
    )
    found = report(ledger)
    assert (found.estimate, found.reconciled, found.total_usd) == (False, 1, Decimal("14.99"))


def test_every_price_is_given_with_source_date_and_doubt():
    ledger = ledgers.ledger(
        {
            "up": T0,
            "ended": "2026-03-02T12:00:00Z",
            "prices": [["2026-03-02T10:30:00Z", "15"], ["2026-03-02T11:00:00Z", "16"]],
        }
    )
    (used,) = report(ledger).prices
    assert (used.usd_per_h, used.source, used.changes, used.assumed) == (16, "test", 1, True)


def test_notes_tell_of_machines_without_an_end_and_unsure_rules():
    ledger = ledgers.ledger({"cloud": "gcp", "up": T0}, {"cloud": "moon", "up": T0, "ended": T0})
    notes = " / ".join(report(ledger).notes)
    assert "1 machines run still, or their end was not recorded: n0" in notes
    assert "billing rule of gcp is unconfirmed" in notes
    assert "no billing rule is known for moon" in notes


def test_notes_tell_whose_word_an_end_is():
    ended = {"up": T0, "ended": "2026-03-02T11:00:00Z"}
    ledger = ledgers.ledger(
        ended,
        {**ended, "source": "ec2:Client.UserInitiatedShutdown"},
        {**ended, "source": STILL_RUNNING},
        {**ended, "cloud": "local"},
    )
    notes = report(ledger).notes
    assert notes == (
        "r1: 1 ends are as the run saw them, not the cloud's record: n0",
        "r1: 1 machines run still, or their end was not recorded: n2",
    )


def test_several_runs_are_told_apart():
    runs = [RunCost(name, mixed(), ()) for name in ("a", "b")]
    found = bill.build(runs, ledgers.RULES, NOW_S, by="node")
    assert found.total_usd == Decimal("280.32")
    assert {"a/od", "b/od"} <= {line.name for line in found.lines}
    assert [line.name for line in bill.build(runs, ledgers.RULES, NOW_S, by="run").lines] == ["a", "b"]


def test_since_leaves_out_what_was_before():
    """From 11:30 on: 0.5 x (55.04 + 15 + 0.04) = 35.04."""
    assert report(since_s=ledgers.utc("2026-03-02T11:30:00Z")).total_usd == Decimal("35.04")


def test_own_machines_are_priced_as_parts_of_a_rented_one():
    """A trainer for 1 h at 55.04/8 = 6.88; two explorers for 0.5 h at 16/8: 1.00 each, one taken: free."""
    own = {"cloud": "local", "type": "local", "gpus": 1, "prices": [], "up": T0}
    ledger = ledgers.ledger(
        {**own, "class": "on_demand", "ended": "2026-03-02T11:00:00Z"},
        {**own, "ended": "2026-03-02T10:30:00Z"},
        {**own, "ended": "2026-03-02T10:30:00Z", "reason": "interrupted"},
    )
    market = {"cloud": "aws", "region": "us-east-2", "instance_type": "p5.48xlarge"}
    rented = {
        price_class: ledgers.cost.PricePoint(
            **market, price_class=price_class, usd_per_h=Decimal(usd), source="t"
        )
        for price_class, usd in (("on_demand", "55.04"), ("spot", "16"))
    }
    found = report(ledger, rented=rented)
    assert found.total_usd == 0
    assert usd_of(found.rented_units) == Decimal("7.88")
    assert found.to_dict()["own_machines_on_h100_usd"] == 7.88
    assert report(rented=rented).rented_units is None  # nothing of the user's own here
    assert report(ledger).rented_units is None  # no price to compare with


def test_scores_of_damaged_metric_rows():
    rows = [
        {"kind": "eval", "at_s": 20.0, "score": 0.6},
        {"kind": "eval", "at_s": 10, "score": 0.5},
        {"kind": "iteration", "at_s": 11.0, "score": 0.9},
        {"kind": "eval", "at_s": 12.0, "score": None},
        {"kind": "eval", "at_s": 13.0, "score": math.nan},
        {"kind": "eval", "score": 0.7},
        {"kind": "eval", "at_s": True, "score": 0.7},
    ]
    assert bill.scores_of(rows) == ((10.0, 0.5), (20.0, 0.6))


def test_prices_that_the_run_did_not_record_come_from_the_book_with_their_date():
    ledger = ledgers.ledger(
        {"up": T0, "ended": "2026-03-02T11:00:00Z", "prices": [], "region": "us-east-2", "zone": "use2-az1"}
    )
    filled = prices.fill(ledger, prices.PriceBook(prices.packaged_quotes()))
    found = report(filled)
    assert found.total_usd == Decimal("17.29")
    assert (found.prices[0].as_of, found.unpriced) == ("2026-07-20", ())
    assert found.saved_unknown == ()


def test_recorded_prices_are_not_replaced_by_the_book():
    ledger = ledgers.ledger(
        {"up": T0, "ended": "2026-03-02T11:00:00Z", "region": "us-east-2", "zone": "use2-az1"}
    )
    assert report(prices.fill(ledger, prices.PriceBook(prices.packaged_quotes()))).total_usd == Decimal(
        "15.00"
    )


def test_the_h100_that_own_machines_are_compared_with_is_known_offline():
    found = prices.h100_prices(prices.PriceBook(prices.packaged_quotes()))
    assert found["on_demand"].usd_per_h == Decimal("55.04")
    assert found["spot"].usd_per_h == Decimal("17.2949")
    assert "dearest zone" in found["spot"].source
