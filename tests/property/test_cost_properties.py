"""Money adds up: over splits of time, over any grouping, in any order of records; it is never negative."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from spotlight.core import billing, cost, money
from spotlight.core.billing import BillingRule
from spotlight.core.ledger import ledger_from_records

HOUR = 3600.0
seconds = st.floats(0, 10 * HOUR, allow_nan=False).map(lambda t: round(t, 3))
prices = st.decimals(0, 200, places=6, allow_nan=False)
rules = st.fixed_dictionaries(
    {
        cloud: st.builds(
            BillingRule,
            cloud=st.just(cloud),
            granularity_s=st.sampled_from([1, 60, 3600]),
            minimum_s=st.sampled_from([0, 60, 600]),
            free_if_interrupted_within_s=st.sampled_from([0, 3600]),
            price=st.sampled_from(["in_effect", "at_start"]),
            disk_usd_per_gb_month=st.none() | prices,
        )
        for cloud in ("a", "b")
    }
)


@st.composite
def nodes(draw, index):
    """Records of one node; times in any order, so that clocks may be wrong."""
    key = {"node": f"n{draw(st.integers(0, 2))}", "launch": index}
    cloud, price_class = draw(st.sampled_from("ab")), draw(st.sampled_from(["spot", "on_demand"]))
    market = {"cloud": cloud, "instance_type": "x", "price_class": price_class}
    role, disk_gb = (
        draw(st.sampled_from(["head", "trainer", "explorer"])),
        draw(st.sampled_from(["0", "100"])),
    )
    records = [
        cost.NodeRequested(
            **key,
            **market,
            at_s=draw(seconds),
            gpus=draw(st.integers(0, 8)),
            role=role,
            disk_gb=Decimal(disk_gb),
        )
    ]
    if draw(st.booleans()):
        records.append(cost.NodeUp(**key, at_s=draw(seconds)))
    if draw(st.booleans()):
        records.append(cost.NodeReady(**key, at_s=draw(seconds)))
    if draw(st.booleans()):
        reason = draw(st.sampled_from(["user", "interrupted", "stopped", "failed"]))
        records.append(
            cost.NodeEnded(**key, at_s=draw(seconds), reason=reason, keeps_disk=draw(st.booleans()))
        )
    for _ in range(draw(st.integers(0, 4))):
        start, end = draw(seconds), draw(seconds)
        work = draw(st.sampled_from(["useful", "lost"]))
        records.append(
            cost.NodeWorked(**key, start_s=start, at_s=end, gpus=draw(st.integers(0, 9)), work=work)
        )
    for _ in range(draw(st.integers(0, 2))):
        records.append(cost.NodeEgress(**key, at_s=draw(seconds), gb=draw(prices), usd_per_gb=draw(prices)))
    if draw(st.integers(0, 5)) == 0:
        records.append(cost.NodeBilled(**key, usd=draw(prices), source="bill"))
    for _ in range(draw(st.integers(0, 3))):
        records.append(cost.PricePoint(**market, at_s=draw(seconds), usd_per_h=draw(prices), source="test"))
    return records


@st.composite
def journals(draw):
    return [cost.encode(r) for i in range(draw(st.integers(1, 5))) for r in draw(nodes(i))]


@given(journals(), rules, st.lists(seconds, min_size=1, max_size=4), seconds)
def test_cost_is_additive_over_splits_of_time(journal, rules, cuts, now_s):
    ledger = ledger_from_records(journal)
    edges = [-math.inf, *sorted(cuts), math.inf]
    parts = [
        billing.bill(ledger, rules, now_s, since_s=a, until_s=b).units for a, b in itertools.pairwise(edges)
    ]
    assert sum(parts) == billing.bill(ledger, rules, now_s).units


@given(journals(), rules, seconds)
def test_no_charge_is_negative_and_every_machine_is_accounted_for(journal, rules, now_s):
    ledger = ledger_from_records(journal)
    bill = billing.bill(ledger, rules, now_s)
    gpu_ms = defaultdict(int)
    for charge in bill.charges:
        assert charge.units >= 0
        assert charge.gpu_ms >= 0
        if charge.phase != "rounding":
            gpu_ms[charge.key] += charge.gpu_ms
    for item in ledger.intervals:
        if item.up_s is not None:
            end_s = now_s if item.ended_s is None else item.ended_s
            existed_ms = max(0, money.to_ms(end_s) - money.to_ms(item.up_s)) * max(1, item.gpus)
            assert gpu_ms[item.key] == existed_ms


@given(journals(), rules, seconds, st.randoms(use_true_random=False))
def test_order_and_repetition_of_records_do_not_matter(journal, rules, now_s, random):
    by_time = {  # two prices of one market at one moment: the later record counts, so keep one of each
        (r.get("cloud"), r.get("price_class"), r.get("at_s")) if r["kind"] == "price" else i: r
        for i, r in enumerate(journal)
    }
    journal = list(by_time.values())
    shuffled = journal + journal[:3]
    random.shuffle(shuffled)
    one, other = (billing.bill(ledger_from_records(records), rules, now_s) for records in (journal, shuffled))
    assert sorted(one.charges) == sorted(other.charges)
    assert sorted(one.unpriced) == sorted(other.unpriced)


@given(journals(), rules, seconds, seconds)
def test_a_later_now_never_costs_less(journal, rules, one, two):
    """Unless a bill has been entered, which then is the truth at any time."""
    ledger = ledger_from_records(record for record in journal if record["kind"] != "billed")
    first, second = sorted((one, two))
    assert billing.bill(ledger, rules, first).units <= billing.bill(ledger, rules, second).units


@given(st.lists(st.integers(0, 10**18), max_size=20), st.sampled_from([1, 7, money.UNITS_PER_CENT]))
def test_rounded_lines_add_up_to_the_rounded_total(parts, unit):
    rounded = money.apportion(parts, unit)
    assert sum(rounded) == (sum(parts) + unit // 2) // unit
    for part, whole in zip(parts, rounded, strict=True):
        assert abs(whole * unit - part) < unit


@given(nodes(0))
def test_records_survive_the_journal(records):
    for record in records:
        assert cost.decode(cost.encode(record)) == record
