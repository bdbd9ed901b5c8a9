"""Which zones to ask for a spot machine, and when: no capacity backs a zone off, no quota gives the region up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class BackOff:
    """After the n-th failure in a row a zone rests for first_s 2^(n-1), at most max_s, up to a third less by chance.

    A machine that lived shorter than `flap_s` counts as a failure of its zone.
    """

    first_s: float = 30.0
    max_s: float = 900.0
    flap_s: float = 120.0

    def rest_s(self, failures: int, rng: np.random.Generator) -> float:
        """How long to rest after so many failures in a row (>= 1)."""
        longest = min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 60))
        return longest * rng.uniform(2 / 3, 1)


@dataclass(slots=True)
class _Zone:
    failures: int = 0
    open_at: float = -math.inf


@dataclass(slots=True)
class ZoneBook:
    """The zones of one region in order of preference. `given_up` says why nothing is asked any more."""

    zones: Sequence[str]
    rng: np.random.Generator
    back_off: BackOff = BackOff()
    given_up: str = ""
    _states: dict[str, _Zone] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._states = {zone: _Zone() for zone in self.zones}

    def open(self, now: float) -> tuple[str, ...]:
        """Zones that may be asked now."""
        if self.given_up:
            return ()
        return tuple(zone for zone in self.zones if self._states[zone].open_at <= now)

    def next_open(self) -> float:
        """When some zone may be asked (again); inf: never."""
        return math.inf if self.given_up else min(state.open_at for state in self._states.values())

    def failed(self, zones: Iterable[str], now: float) -> None:
        """These had no capacity."""
        for zone in zones:
            if state := self._states.get(zone):
                state.failures += 1
                state.open_at = now + self.back_off.rest_s(state.failures, self.rng)

    def give_up(self, reason: str) -> None:
        """The account may not have machines here: asking again is of no use."""
        self.given_up = reason

    def lost(self, zone: str, lived_s: float, now: float) -> None:
        """A machine of this zone was taken after so long."""
        if lived_s < self.back_off.flap_s:
            self.failed([zone], now)
        elif state := self._states.get(zone):
            state.failures, state.open_at = 0, -math.inf
