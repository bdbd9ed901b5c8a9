"""What the book writes is what the ledger reads."""

from __future__ import annotations

from decimal import Decimal

import pytest
from ledgers import RULES

from spotlight.core.billing import bill
from spotlight.core.cost import Market, NodeEnded, PricePoint
from spotlight.core.ledger import ledger_from_records, name
from spotlight.core.money import usd_of
from spotlight.observe.node_book import NodeBook

MARKET = Market("aws", "us-east-2", "", "p5.48xlarge", "spot")
T0 = 1_772_000_000.0


class Clocks:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self):
        self.mono, self.offset = 100.0, T0 - 100.0

    def wall(self):
        return self.mono + self.offset

    def book(self, journal, known=None):
        return NodeBook(journal.append, known=known, wall=self.wall, monotonic=lambda: self.mono)


def test_a_life_that_is_taken_and_a_second_one_with_the_clock_set_back_in_between():
    journal, clocks = [], Clocks()
    book = clocks.book(journal)
    point = PricePoint(**MARKET._asdict(), usd_per_h=Decimal("15"), source="test")
    book.price(point)
    book.price(point)
    assert len(journal) == 1

    book.requested("s0", MARKET, gpus=8, role="explorer")
    book.up("s0", zone="use2-az1", instance_id="i-1")
    clocks.mono += 600
    book.ready("s0")
    clocks.offset -= 7200  # NTP
    clocks.mono += 6600
    book.notice("s0")
    book.ended("s0", "interrupted")
    book.requested("s0", MARKET, gpus=8, role="explorer")
    book.up("s0")
    clocks.mono += 1800
    book.ended("s0", "user")

    ledger = ledger_from_records(journal)
    first, second = ledger.intervals
    assert [name(item.key) for item in (first, second)] == ["s0", "s0#1"]
    assert (first.zone, first.instance_id, first.end_reason) == ("use2-az1", "i-1", "interrupted")
    assert (first.up_s, first.ready_s, first.ended_s) == (T0, T0 + 600, T0 + 7200)
    assert first.notice_s == first.ended_s == second.up_s
    assert usd_of(bill(ledger, RULES, T0 + 1e6).units) == Decimal("37.50")  # 2 h and half an hour at 15


def test_a_resumed_run_numbers_launches_on():
    journal, clocks = [], Clocks()
    book = clocks.book(journal)
    book.requested("s0", MARKET, gpus=8, role="explorer")
    book.requested("s0", MARKET, gpus=8, role="explorer")
    again = clocks.book(journal, known=ledger_from_records(journal))
    assert again.requested("s0", MARKET, gpus=8, role="explorer").launch == 2
    assert again.launch_of("s0") == 2


def test_the_cloud_s_word_comes_later_and_counts():
    journal, clocks = [], Clocks()
    book = clocks.book(journal)
    book.requested("s0", MARKET, gpus=8, role="explorer")
    book.up("s0")
    clocks.mono += 60
    book.ended("s0", "failed")
    book.record(
        NodeEnded(node="s0", at_s=T0 + 55, reason="interrupted", source="ec2:Server.SpotInstanceTermination")
    )
    (item,) = ledger_from_records(journal).intervals
    assert (item.ended_s, item.end_reason) == (T0 + 55, "interrupted")


def test_events_of_a_name_that_was_never_asked_for_are_a_bug():
    with pytest.raises(KeyError):
        Clocks().book([]).up("s0")
