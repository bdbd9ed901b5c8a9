"""The report's work grows with the journal, not faster; counted in calls, as clocks do not repeat."""

from __future__ import annotations

import sys

from ledgers import RULES, ledger

from spotlight.observe import bill


def calls(count):
    """Function calls made for a report over one machine with `count` stretches of work and `count` prices."""
    prices = [[float(i), "15"] for i in range(count)]
    more = [
        {"kind": "worked", "node": "n0", "start_s": 2.0 * i, "at_s": 2.0 * i + 1, "gpus": 1}
        for i in range(count)
    ]
    made = 0

    def tally(frame, event, argument):
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        its = ledger({"up": 0.0, "ready": 0.0, "ended": 2.0 * count, "prices": prices}, more=more)
        bill.build([bill.RunCost("r", its)], RULES, 2.0 * count)
    finally:
        sys.setprofile(None)
    return made


def test_twice_the_records_are_twice_the_work():
    calls(10)  # caches warm
    one, two = calls(1000), calls(2000)
    assert 1.8 < two / one < 2.2
