"""Zones rest longer after every failure; quota ends it."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from spotlight.core.zones import BackOff, ZoneBook


def book(**back_off: float) -> ZoneBook:
    return ZoneBook(("a", "b"), Random(0), BackOff(**back_off))


def test_no_capacity_rests_that_zone_alone() -> None:
    zones = book(first_s=30)
    assert zones.open(0) == ("a", "b")
    zones.failed(["a"], 0)
    assert zones.open(0) == ("b",)
    assert zones.open(30) == ("a", "b")


def test_no_quota_gives_the_region_up() -> None:
    zones = book()
    zones.give_up("VcpuLimitExceeded")
    assert zones.open(1e9) == ()
    assert zones.next_open() == math.inf


def test_a_flapping_zone_rests_and_a_steady_one_is_forgiven() -> None:
    zones = book(first_s=30, flap_s=120)
    zones.lost("a", 5, 0)
    assert zones.open(0) == ("b",)
    zones.lost("a", 600, 1)
    assert zones.open(1) == ("a", "b")
    zones.lost("elsewhere", 1, 0)  # not ours: no matter


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_rests_grow_and_are_bounded(failures: int, seed: int) -> None:
    rule = BackOff(first_s=10, max_s=300)
    rest = rule.rest_s(failures, Random(seed))
    longest = min(300, 10 * 2.0 ** (failures - 1))
    assert longest * 2 / 3 <= rest <= longest


def test_the_next_opening_is_the_earliest() -> None:
    zones = book(first_s=30)
    zones.failed(["a", "b"], 0)
    assert 20 <= zones.next_open() <= 30
    assert zones.open(zones.next_open()) != ()
