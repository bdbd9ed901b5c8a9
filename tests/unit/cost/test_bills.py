"""Every hand-computed bill in bills.yaml comes out to the cent."""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal

import ledgers
import pytest
import yaml

from spotlight.core import billing
from spotlight.core.ledger import name
from spotlight.core.money import usd_of

CASES = yaml.safe_load((ledgers.HERE / "bills.yaml").read_text())


def cents(units: int) -> str:
    return str(usd_of(units).quantize(Decimal("0.01")))


def test_there_are_enough_cases_and_each_has_its_own_name():
    names = [case["name"] for case in CASES]
    assert len(names) == len(set(names)) >= 25


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_bill(case):
    ledger = ledgers.ledger(*case["nodes"], more=case.get("more", []), repeat=case.get("repeat", 1))
    now_s = ledgers.utc(case.get("now", "2027-01-01T00:00:00Z"))
    since_s = ledgers.utc(case["since"]) if "since" in case else float("-inf")
    bill = billing.bill(ledger, ledgers.RULES, now_s, since_s=since_s)

    assert cents(bill.units) == case["usd"]
    assert list(bill.unpriced) == case.get("unpriced", [])
    assert len(ledger.warnings) == case.get("warnings", 0)
    by_node, by_phase = defaultdict(int), defaultdict(int)
    for charge in bill.charges:
        assert charge.units >= 0
        by_node[name(charge.key)] += charge.units
        by_phase[charge.phase] += charge.units
    for node, usd in case.get("nodes_usd", {}).items():
        assert cents(by_node[node]) == usd
    for phase, usd in case.get("phases", {}).items():
        assert cents(by_phase[phase]) == usd
    if "saved_usd" in case:
        saving = billing.saving(ledger, ledgers.RULES, now_s)
        assert cents(saving.on_demand_units - saving.spot_units) == case["saved_usd"]
