"""Exact money: integers of price x time, and the meter that counts them.

An amount is an integer of nano-dollars-per-hour times milliseconds ("units"), so price x time is never
rounded and every sum is exact. Rounding to cents happens once, on the way out (`apportion`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from decimal import ROUND_HALF_EVEN, Decimal
from itertools import accumulate

MS_PER_H = 3_600_000
UNITS_PER_USD = 10**9 * MS_PER_H
UNITS_PER_CENT = UNITS_PER_USD // 100


def units_of(usd: Decimal) -> int:
    """Dollars as units."""
    return to_nano(usd) * MS_PER_H


def usd_of(units: int) -> Decimal:
    """Units as dollars, to the micro-dollar."""
    return (Decimal(units) / UNITS_PER_USD).quantize(Decimal("0.000001"))


def apportion(parts: Sequence[int], unit: int = UNITS_PER_CENT) -> list[int]:
    """Round `parts` (>= 0) to whole multiples of `unit` so that they add up to the rounded total.

    Largest remainder: each part is within one `unit` of its exact value. Returns the multiples.
    """
    floors = [part // unit for part in parts]
    missing = (sum(parts) + unit // 2) // unit - sum(floors)
    by_remainder = sorted(range(len(parts)), key=lambda i: floors[i] * unit - parts[i])
    for i in by_remainder[:missing]:
        floors[i] += 1
    return floors


def cents(parts: Sequence[int]) -> list[Decimal]:
    """`parts` in dollars to the cent, adding up to their total."""
    return [Decimal(whole).scaleb(-2) for whole in apportion(parts)]


class Meter:
    """The charge of one machine or disk since its start, as a function of time."""

    def __init__(self, start_ms: int, end_ms: int, prices: Sequence[tuple[int, int]]) -> None:
        """`prices`: (from ms, nano-dollars per hour), at least one, in time order; the first also before it."""
        self.start_ms, self.end_ms, self._scale = start_ms, max(start_ms, end_ms), (1, 1)
        self._at = [at_ms for at_ms, _ in prices]
        self._rate = [rate for _, rate in prices]
        spans = ((b - a) * rate for a, b, rate in zip(self._at, self._at[1:], self._rate, strict=False))
        self._sum = list(accumulate(spans, initial=0))
        self._before = self._total(start_ms)

    def until(self, at_ms: int) -> int:
        """Units charged from the start to `at_ms`."""
        units = self._total(min(max(at_ms, self.start_ms), self.end_ms)) - self._before
        return units * self._scale[0] // self._scale[1]

    def _total(self, at_ms: int) -> int:
        """Price integrated from the first price's time to `at_ms`; negative before it."""
        i = max(0, bisect_right(self._at, at_ms) - 1)
        return self._sum[i] + (at_ms - self._at[i]) * self._rate[i]

    def scaled(self, scale: tuple[int, int]) -> Meter:
        """This meter, multiplied by scale[0] / scale[1]."""
        other = copy(self)
        other._scale = scale
        return other

    def between(self, from_ms: int, to_ms: int) -> int:
        """Units charged from `from_ms` to `to_ms`."""
        return self.until(to_ms) - self.until(from_ms) if to_ms > from_ms else 0


def to_ms(at_s: float) -> int:
    """Seconds as whole milliseconds; the infinities become a time before or after all others."""
    return round(at_s * 1000) if math.isfinite(at_s) else int(math.copysign(10**18, at_s))


def to_nano(usd: Decimal) -> int:
    """Dollars as whole nano-dollars."""
    return int((usd * 10**9).to_integral_value(ROUND_HALF_EVEN))
