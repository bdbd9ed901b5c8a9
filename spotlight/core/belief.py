"""What the planner believes about the reward law of each prompt, and the draws it expects from it.

Two models, chosen by the rewards themselves:

* **Levels** (0/1, GenEval, edit distance of short words): a Dirichlet over the levels seen so far. Its
  prior is the histogram of the prompt's category with a small mass, plus the prompt's own history.
* **Scale** (more than `MAX_LEVELS` different values): a location and a scale per prompt, the scale shrunk
  to the category's (scaled inverse chi-square), the shape taken from pooled standardised residuals.

Draws integrate over the posterior: replicates of a prompt about which little is known differ a lot, which
is what makes trying it worth something.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spotlight.core.select import Floats

MAX_LEVELS = 32
_SHAPE_SIZE = 512  # standardised residuals kept as the shape of the scale model
_SHAPE_MINIMUM = 64  # below this many the shape is normal
_PRIOR_FREEDOM = 4.0  # what the category's variance counts for, in draws


@dataclass(slots=True)
class _Past:
    """Discounted rewards of one prompt or category: counts per level, number, squared deviations."""

    counts: Floats = field(default_factory=lambda: np.zeros(0))
    number: float = 0.0
    square: float = 0.0
    iteration: int = 0

    def at(self, iteration: int, discount: float, num_levels: int) -> _Past:
        """The same past as it weighs at a later iteration, its counts padded to `num_levels`."""
        keep = discount ** max(iteration - self.iteration, 0)
        counts = np.zeros(num_levels)
        known = min(len(self.counts), num_levels)
        counts[:known] = self.counts[:known] * keep
        return _Past(counts, self.number * keep, self.square * keep, iteration)


class RewardBelief:
    """Posterior over the reward laws of prompts, learned over iterations.

    `prior_mass` is the weight of the category's law in draws; the discounts are what a draw's weight is
    multiplied by per iteration, because the policy moves. `draws` is a function of the data alone: its
    random numbers are the same in every call, so prompts are compared on common random numbers.
    """

    def __init__(
        self,
        *,
        prior_mass: float = 2.0,
        row_discount: float = 0.9,
        category_discount: float = 0.98,
        seed: int = 0,
    ) -> None:
        self.prior_mass = prior_mass
        self.row_discount = row_discount
        self.category_discount = category_discount
        self._seed = seed
        self._index: dict[float, int] = {}
        self._levels = np.zeros(0)
        self._scale_model = False
        self._rows: dict[int, _Past] = {}
        self._categories: dict[str, _Past] = {}
        self._shape = np.zeros(0)

    def see(self, reward: float) -> None:
        """Make a finite `reward` a known level; too many different ones switch to the scale model."""
        if self._scale_model or reward in self._index:
            return
        if len(self._index) >= MAX_LEVELS:
            self._scale_model = True
            return
        self._index[reward] = len(self._index)
        self._levels = np.append(self._levels, reward)

    def learn(self, row: int, category: str, rewards: Floats, iteration: int) -> None:
        """Add one iteration's finite draft rewards of a prompt to its history and its category's."""
        for reward in rewards.tolist():
            self.see(reward)
        square = float(np.square(rewards - rewards.mean()).sum()) if len(rewards) else 0.0
        new = _Past(self._count(rewards), max(len(rewards) - 1.0, 0.0), square, iteration)
        _add(self._rows, row, new, self.row_discount)
        _add(self._categories, category, new, self.category_discount)
        if square > 0 and len(rewards) >= 4:
            residuals = (rewards - rewards.mean()) / np.sqrt(square / (len(rewards) - 1))
            self._shape = np.concatenate([self._shape, residuals])[-_SHAPE_SIZE:]

    def draws(
        self, row: int, category: str, drafted: Floats, iteration: int, shape: tuple[int, int]
    ) -> Floats:
        """Posterior-predictive rewards, `shape` = (replicates, width), given this iteration's drafts.

        `drafted` holds the finite draft rewards of the row so far. With nothing known at all the draws
        are normal: every prompt then looks alike.
        """
        rng = np.random.default_rng(self._seed)
        if self._scale_model or not len(self._levels):
            return self._scale_draws(rng, row, category, drafted, iteration, shape)
        return self._level_draws(rng, row, category, drafted, iteration, shape)

    def _level_draws(
        self,
        rng: np.random.Generator,
        row: int,
        category: str,
        drafted: Floats,
        iteration: int,
        shape: tuple[int, int],
    ) -> Floats:
        points = rng.random(shape)
        alpha = self._level_prior(row, category, iteration) + self._count(drafted)
        edges = np.cumsum(rng.standard_gamma(alpha, size=(shape[0], len(alpha))), axis=1)
        picked = (points[:, :, None] * edges[:, None, -1:] > edges[:, None, :-1]).sum(axis=-1)
        return np.asarray(self._levels[picked])

    def _level_prior(self, row: int, category: str, iteration: int) -> Floats:
        size = len(self._levels)
        pooled = np.full(size, 0.5)
        for past in self._categories.values():
            pooled[: len(past.counts)] += past.counts
        own = self._categories.get(category, _Past()).at(iteration, self.category_discount, size)
        law = own.counts + 2.0 * pooled / pooled.sum()
        history = self._rows.get(row, _Past()).at(iteration, self.row_discount, size)
        return np.asarray(self.prior_mass * law / law.sum() + history.counts)

    def _scale_draws(
        self,
        rng: np.random.Generator,
        row: int,
        category: str,
        drafted: Floats,
        iteration: int,
        shape: tuple[int, int],
    ) -> Floats:
        residuals = self._residuals(rng, shape)
        centre = rng.standard_normal(shape[0])
        past = self._rows.get(row, _Past()).at(iteration, self.row_discount, 0)
        freedom = _PRIOR_FREEDOM + past.number + max(len(drafted) - 1, 0)
        square = _PRIOR_FREEDOM * self._usual_variance(category, iteration) + past.square
        mean = float(drafted.mean()) if len(drafted) else 0.0
        square += float(np.square(drafted - mean).sum())
        scale = np.sqrt(square / rng.chisquare(freedom, size=shape[0]))
        middle = mean + centre * scale / np.sqrt(max(len(drafted), 1))
        return np.asarray(middle[:, None] + scale[:, None] * residuals)

    def _usual_variance(self, category: str, iteration: int) -> float:
        everyone = list(self._categories.values())
        number = sum(past.number for past in everyone)
        pooled = sum(past.square for past in everyone) / number if number else 1.0
        own = self._categories.get(category, _Past()).at(iteration, self.category_discount, 0)
        return (own.square + _PRIOR_FREEDOM * pooled) / (own.number + _PRIOR_FREEDOM)

    def _residuals(self, rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
        if len(self._shape) < _SHAPE_MINIMUM:
            return rng.standard_normal(shape)
        return np.quantile(self._shape, rng.random(shape))

    def _count(self, rewards: Floats) -> Floats:
        counts = np.zeros(len(self._levels))
        for reward in rewards.tolist():
            if reward in self._index:
                counts[self._index[reward]] += 1.0
        return counts


def _add(pasts: dict[Any, _Past], key: int | str, new: _Past, discount: float) -> None:
    old = pasts.get(key, _Past()).at(new.iteration, discount, len(new.counts))
    counts = old.counts + new.counts
    pasts[key] = _Past(counts, old.number + new.number, old.square + new.square, new.iteration)
