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

from typing import Any

import numpy as np

from spotlight.core.reward_history import Past, RewardHistory
from spotlight.core.select import Floats

MAX_LEVELS = 32
_LEVEL_MASS = 4.0  # what the category's histogram counts for, in draws
_SCALE_FREEDOM = 8.0  # what the category's variance counts for, in draws
_POOLED_MASS = 2.0  # what all categories together count for within one category
_SHAPE_SIZE = 512  # standardised residuals kept as the shape of the scale model
_SHAPE_MINIMUM = 64  # with fewer the shape is normal


class RewardBelief:
    """Posterior over the reward laws of prompts, learned over iterations.

    `draws` is a function of the data alone: its random numbers are the same in every call, so that
    prompts are compared on common random numbers and plans do not depend on the order of calls.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._index: dict[float, int] = {}
        self._levels = np.zeros(0)
        self._scale_model = False
        self._rows = RewardHistory()
        self._categories = RewardHistory(start=0.97)
        self._pooled = Past()
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
        if not len(rewards):
            return
        for reward in rewards.tolist():
            self.see(reward)
        square = float(np.square(rewards - rewards.mean()).sum())
        new = Past(self._count(rewards), len(rewards) - 1.0, square, iteration)
        levels = not self._scale_model
        self._rows.add(row, new, self._prior(category, iteration), levels=levels)
        self._categories.add(category, new, self._everyone(), levels=levels)
        self._pooled = self._pooled.at(iteration, 1.0, len(self._levels)).plus(new)
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
        past = self._prior(category, iteration).plus(self._rows.past(row, iteration, len(self._levels)))
        if self._scale_model or not len(self._levels):
            return self._scale_draws(rng, past, drafted, shape)
        return self._level_draws(rng, past.counts + self._count(drafted), shape)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain values."""
        return {
            "levels": self._levels.tolist(),
            "scale_model": self._scale_model,
            "rows": self._rows.state(),
            "categories": self._categories.state(),
            "pooled": self._pooled.state(),
            "shape": self._shape.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with the same seed."""
        self._levels, self._shape = np.array(state["levels"]), np.array(state["shape"])
        self._index = {level: i for i, level in enumerate(state["levels"])}
        self._scale_model = bool(state["scale_model"])
        self._rows.restore(state["rows"])
        self._categories.restore(state["categories"])
        self._pooled = Past.of(state["pooled"])

    def _level_draws(self, rng: np.random.Generator, alpha: Floats, shape: tuple[int, int]) -> Floats:
        points = rng.random(shape)
        edges = np.cumsum(rng.standard_gamma(alpha, size=(shape[0], len(alpha))), axis=1)
        picked = (points[:, :, None] * edges[:, None, -1:] > edges[:, None, :-1]).sum(axis=-1)
        return np.asarray(self._levels[picked])

    def _scale_draws(
        self, rng: np.random.Generator, past: Past, drafted: Floats, shape: tuple[int, int]
    ) -> Floats:
        residuals = self._residuals(rng, shape)
        centre = rng.standard_normal(shape[0])
        mean = float(drafted.mean()) if len(drafted) else 0.0
        square = past.square + float(np.square(drafted - mean).sum())
        freedom = past.freedom + max(len(drafted) - 1, 0)
        scale = np.sqrt(square / rng.chisquare(freedom, size=shape[0]))
        middle = mean + centre * scale / np.sqrt(max(len(drafted), 1))
        return np.asarray(middle[:, None] + scale[:, None] * residuals)

    def _prior(self, category: str, iteration: int) -> Past:
        """The category's law as `_LEVEL_MASS` counts, its variance as `_SCALE_FREEDOM` draws."""
        own = self._categories.past(category, iteration, len(self._levels)).plus(self._everyone())
        counts = own.counts * (_LEVEL_MASS / max(own.counts.sum(), 1e-9))
        return Past(counts, _SCALE_FREEDOM, _SCALE_FREEDOM * own.square / own.freedom, iteration)

    def _everyone(self) -> Past:
        """The law over all categories, as `_POOLED_MASS` counts and `_SCALE_FREEDOM` draws."""
        pooled = self._pooled.at(self._pooled.iteration, 1.0, len(self._levels))
        counts = pooled.counts + 0.5
        variance = pooled.square / pooled.freedom if pooled.freedom else 1.0
        mass = _POOLED_MASS / max(counts.sum(), 1e-9)
        return Past(counts * mass, _SCALE_FREEDOM, _SCALE_FREEDOM * variance, pooled.iteration)

    def _residuals(self, rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
        if len(self._shape) < _SHAPE_MINIMUM:
            return rng.standard_normal(shape)
        return self._shape[rng.integers(len(self._shape), size=shape)]

    def _count(self, rewards: Floats) -> Floats:
        counts = np.zeros(len(self._levels))
        for reward in rewards.tolist():
            if reward in self._index:
                counts[self._index[reward]] += 1.0
        return counts
