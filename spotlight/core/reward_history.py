"""Discounted memory of rewards, by prompt or category, that learns how fast to forget.

How fast a policy moves is not known beforehand, so every key's past is kept under several discounts, and
the one that predicted later rewards best is used (prequential likelihood).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spotlight.core.select import Floats

DISCOUNTS = (0.8, 0.9, 0.97, 1.0)  # a draft's weight is multiplied by this per iteration
_SCORE_FADE = 0.999  # of the likelihoods, per prompt scored
_MOST_KEYS = 4096  # the keys longest not seen are forgotten


@dataclass(slots=True)
class Past:
    """Weighted rewards: counts per level, degrees of freedom, sum of squared deviations from means."""

    counts: Floats = field(default_factory=lambda: np.zeros(0))
    freedom: float = 0.0
    square: float = 0.0
    iteration: int = 0

    def at(self, iteration: int, discount: float, num_levels: int) -> Past:
        """The same past as it weighs at a later iteration, its counts fitted to `num_levels`."""
        keep = discount ** max(iteration - self.iteration, 0)
        counts = np.zeros(num_levels)
        known = min(len(self.counts), num_levels)
        counts[:known] = self.counts[:known] * keep
        return Past(counts, self.freedom * keep, self.square * keep, iteration)

    def plus(self, other: Past) -> Past:
        """Both together, as of the other's iteration; the counts are equally long."""
        counts = self.counts + other.counts
        return Past(counts, self.freedom + other.freedom, self.square + other.square, other.iteration)

    def state(self) -> list[Any]:
        """As plain values; `of` is the way back."""
        return [self.counts.tolist(), self.freedom, self.square, self.iteration]

    @classmethod
    def of(cls, state: list[Any]) -> Past:
        """The past of that `state`."""
        return cls(np.array(state[0], dtype=np.float64), *state[1:])


class RewardHistory:
    """Pasts by key under each of `DISCOUNTS`."""

    def __init__(self, start: float = 0.9) -> None:
        self._pasts: dict[Hashable, list[Past]] = {}
        self._score = np.zeros(len(DISCOUNTS))
        self._start = DISCOUNTS.index(start)

    @property
    def discount(self) -> float:
        """The discount that predicts best so far."""
        best = int(self._score.argmax())
        return DISCOUNTS[best if self._score[best] > self._score[self._start] else self._start]

    def past(self, key: Hashable, iteration: int, num_levels: int) -> Past:
        """What is remembered of `key` now; empty for a key never seen."""
        found = self._pasts.get(key)
        discount = self.discount
        old = found[DISCOUNTS.index(discount)] if found else Past()
        return old.at(iteration, discount, num_levels)

    def add(self, key: Hashable, new: Past, prior: Past, *, levels: bool) -> None:
        """Score each discount on `new`, on top of `prior`, and remember it.

        With `levels` the score is the Dirichlet-multinomial likelihood of the counts, else that of the
        squared deviations under a scaled inverse chi-square.
        """
        size = len(new.counts)
        old = self._pasts.pop(key, None)
        if old is None:
            self._pasts[key] = [new] * len(DISCOUNTS)
            if len(self._pasts) > _MOST_KEYS:
                del self._pasts[next(iter(self._pasts))]
            return
        aged = [p.at(new.iteration, d, size) for p, d in zip(old, DISCOUNTS, strict=True)]
        likelihood = _log_level_likelihood if levels else _log_scale_likelihood
        self._score = _SCORE_FADE * self._score + np.array([likelihood(prior, past, new) for past in aged])
        self._pasts[key] = [past.plus(new) for past in aged]

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain values."""
        pasts = [[key, [past.state() for past in found]] for key, found in self._pasts.items()]
        return {"score": self._score.tolist(), "pasts": pasts}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._score = np.array(state["score"])
        self._pasts = {key: [Past.of(past) for past in found] for key, found in state["pasts"]}


def _log_level_likelihood(prior: Past, past: Past, new: Past) -> float:
    alpha = prior.counts + past.counts
    total = math.lgamma(alpha.sum()) - math.lgamma(alpha.sum() + new.counts.sum())
    seen = np.flatnonzero(new.counts).tolist()
    return total + sum(math.lgamma(alpha[b] + new.counts[b]) - math.lgamma(alpha[b]) for b in seen)


def _log_scale_likelihood(prior: Past, past: Past, new: Past) -> float:
    freedom, square = prior.freedom + past.freedom, max(prior.square + past.square, 1e-300)
    after, total = freedom + new.freedom, square + new.square
    gammas = math.lgamma(after / 2) - math.lgamma(freedom / 2)
    return gammas + freedom / 2 * math.log(square) - after / 2 * math.log(total)
