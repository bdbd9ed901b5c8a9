"""Records of the journal: what cannot be is refused with the field's name; other types pass by."""

from __future__ import annotations

import math

import ledgers
import pytest

from spotlight.core import cost
from spotlight.core.ledger import NodeKey, ledger_from_records, name
from spotlight.errors import DataError

UP = {"type": "node", "kind": "up", "node": "s0", "at_s": 10.0}
PRICE = {
    "type": "node",
    "kind": "price",
    "cloud": "aws",
    "instance_type": "x",
    "price_class": "spot",
    "source": "s",
}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({**UP, "kind": "exploded"}, "unknown node record 'exploded'"),
        ({"type": "node"}, "unknown node record"),
        ({"type": "node", "kind": "up", "at_s": 1.0}, "'node'"),
        ({**UP, "at_s": "2026-03-02T10:00:00"}, "without an offset"),
        ({**UP, "at_s": "yesterday"}, "at_s: Invalid isoformat string: 'yesterday'"),
        ({**UP, "at_s": math.nan}, "not a time"),
        ({**UP, "at_s": None}, "at_s: not a time: None"),
        ({**UP, "at_s": True}, "not a time"),
        ({**UP, "launch": -1}, "launch: must be a whole number >= 0, got '-1'"),
        ({**UP, "launch": 1.5}, "launch"),
        ({**UP, "node": 7}, "node: expected text, got '7'"),
        ({**PRICE, "usd_per_h": "-0.01"}, "usd_per_h: must be a finite number >= 0, got -0.01"),
        ({**PRICE, "usd_per_h": "NaN"}, "usd_per_h"),
        ({**PRICE, "usd_per_h": "Infinity"}, "usd_per_h"),
        ({**PRICE, "usd_per_h": "free"}, "usd_per_h"),
        ({**PRICE, "usd_per_h": None}, "usd_per_h"),
        (
            {**PRICE, "usd_per_h": "1", "price_class": "cheap"},
            "price_class: expected one of on_demand, spot, reserved",
        ),
        ({**UP, "instance": "i-1"}, "unknown field 'instance'"),
        ({**UP, "kind": "ended", "reason": "tired"}, "reason: expected one of user, interrupted"),
    ],
)
def test_impossible_records_are_refused_by_field(record, said):
    with pytest.raises(DataError) as caught:
        ledger_from_records([record])
    assert said in caught.value.message


def test_other_records_and_the_journals_own_keys_pass_by():
    own = {"v": 1, "seq": 9, "utc": 3.0}
    ledger = ledger_from_records([{"type": "iteration"}, {**PRICE, "usd_per_h": "1", **own}])
    assert ledger.intervals == ()
    assert len(ledger.prices) == 1


def test_events_of_a_node_that_was_never_asked_for_are_named():
    ledger = ledger_from_records([UP])
    assert ledger.intervals == ()
    assert "s0" in ledger.warnings[0]


def test_defaults_are_left_out_and_come_back():
    record = cost.NodeUp(node="s0", at_s=10.0)
    assert cost.encode(record) == UP
    assert cost.decode(UP) == record
    always = cost.PricePoint(
        cloud="aws", instance_type="x", price_class="spot", usd_per_h=cost.amount("1"), source="s"
    )
    assert "at_s" not in cost.encode(always)  # -inf has no JSON form


def test_iso_and_seconds_are_the_same_moment():
    assert cost.utc_seconds("1970-01-01T01:00:10+01:00") == cost.utc_seconds(10) == 10.0
    assert ledgers.utc("2026-03-02T10:00:00Z") == ledgers.utc("2026-03-02T05:00:00-05:00")


def test_the_zone_that_was_got_counts_not_the_one_asked_for():
    node = {"up": 0.0, "zone": "a", "prices": []}
    ledger = ledgers.ledger(node, more=[{"kind": "up", "node": "n0", "at_s": -1.0, "zone": "b"}])
    assert ledger.intervals[0].zone == "b"


def test_a_machine_that_was_ready_existed_although_nobody_saw_it_come_up():
    ledger = ledgers.ledger({"requested": 100.0, "ready": 160.0, "ended": 400.0})
    assert ledger.intervals[0].up_s == 100.0


def test_only_the_writer_s_own_clock_is_steadied():
    """The cloud's time of an end has no monotonic clock, and is left as it is."""
    ledger = ledgers.ledger(
        {"up": 1000.0, "up_mono": 10.0, "ended": 5000.0},
        more=[{"kind": "ready", "node": "n0", "at_s": 90.0, "mono_s": 70.0, "clock": "head-1"}],
    )
    item = ledger.intervals[0]
    assert (item.ready_s, item.ended_s) == (1060.0, 5000.0)
    assert "wall clock stepped" in ledger.warnings[0]


def test_names_tell_launches_apart():
    assert [name(NodeKey("s3", i)) for i in (0, 1)] == ["s3", "s3#1"]
