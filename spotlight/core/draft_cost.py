"""How long a draft takes, how long the trainers will be busy, and how many drafts fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from spotlight.core.select import Floats


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """What all drafts of an iteration have in common: denoising steps, size in pixels, guidance."""

    steps: int
    height: int
    width: int
    guided: bool = False

    def work(self, degree: int = 1) -> Floats:
        """Cost features (1, pixels, steps L, steps L²), L = 256-pixel tokens, doubled by guidance and
        divided by the sequence-parallel degree: tau = a + decode + steps (b1 L + b2 L²) / degree."""
        pixels = self.height * self.width
        tokens = pixels / 256.0
        passes = self.steps * (2 if self.guided else 1) / degree
        return np.array([1.0, pixels / 65536.0, passes * tokens / 1e3, passes * (tokens / 1e3) ** 2])


class DraftCost:
    """Seconds per draft by setting and degree: recursive least squares on what was measured.

    Measurements fade by `discount` each, so that a changed machine is learned anew; a ridge of weight
    `ridge` keeps features that were never varied at 0. `predict` is None before the first measurement.
    """

    def __init__(self, *, discount: float = 0.995, ridge: float = 1e-3) -> None:
        self.discount, self.ridge = discount, ridge
        self._gram: Floats = np.zeros((4, 4))
        self._moment: Floats = np.zeros(4)
        self._coefficients: Floats = np.zeros(4)
        self._error = 0.0  # faded sum of squared relative errors
        self._weight = 0.0

    def observe(self, setting: DraftSetting, seconds: float, degree: int = 1) -> None:
        """Learn from one draft; times that are not positive and finite are ignored."""
        if not (seconds > 0 and math.isfinite(seconds)):
            return
        if (expected := self.predict(setting, degree)) is not None:
            self._error = self.discount * self._error + (seconds / expected - 1.0) ** 2
        features = setting.work(degree)
        self._gram = self.discount * self._gram + np.outer(features, features)
        self._moment = self.discount * self._moment + features * seconds
        self._weight = self.discount * self._weight + 1.0
        self._solve()

    def predict(self, setting: DraftSetting, degree: int = 1) -> float | None:
        """Expected seconds of one draft, or None when nothing was measured yet."""
        if self._weight == 0.0:
            return None
        floor = 0.1 * float(self._moment[0]) / float(self._gram[0, 0])
        return max(float(setting.work(degree) @ self._coefficients), floor)

    def high(self, setting: DraftSetting, degree: int = 1, quantile: float = 0.9) -> float | None:
        """A high quantile of the seconds of one draft, from the relative errors so far."""
        if (expected := self.predict(setting, degree)) is None:
            return None
        spread = math.sqrt(self._error / self._weight)
        return expected * (1.0 + NormalDist().inv_cdf(quantile) * spread)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain values."""
        sums = {"gram": self._gram.tolist(), "moment": self._moment.tolist()}
        return {**sums, "error": self._error, "weight": self._weight}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._gram, self._moment = np.array(state["gram"]), np.array(state["moment"])
        self._error, self._weight = float(state["error"]), float(state["weight"])
        if self._weight:
            self._solve()

    def _solve(self) -> None:
        ridge = self.ridge * np.diag(np.maximum(np.diag(self._gram), 1e-12))
        self._coefficients = np.asarray(np.linalg.solve(self._gram + ridge, self._moment), dtype=np.float64)


@dataclass(slots=True)
class TrainingBudget:
    """Predicts how long explorers are free while the trainers train.

    An exponentially weighted mean and variance of (training - weight synchronisation) seconds;
    `seconds` is a low quantile of a normal with these, so that drafts seldom run past the end.
    """

    quantile: float = 0.1
    weight: float = 0.2
    mean_s: float = field(default=0.0, init=False)
    variance_s2: float = field(default=0.0, init=False)
    count: int = field(default=0, init=False)

    def observe(self, training_s: float, sync_s: float = 0.0) -> None:
        """Learn from one iteration. The first ones count fully, like a plain mean."""
        free_s = max(training_s - sync_s, 0.0)
        self.count += 1
        share = max(self.weight, 1.0 / self.count)
        error = free_s - self.mean_s
        self.mean_s += share * error
        self.variance_s2 = (1 - share) * (self.variance_s2 + share * error * error)

    def seconds(self) -> float | None:
        """The budget, or None before the first observation."""
        if self.count == 0:
            return None
        # With few observations the variance is not to be trusted: at least 10 % until five are in.
        least = 0.1 * self.mean_s if self.count < 5 else 0.0
        deviation = max(math.sqrt(self.variance_s2), least)
        return max(self.mean_s + NormalDist().inv_cdf(self.quantile) * deviation, 0.0)


def survival(hazard_per_gpu_s: float, seconds: float, gpus: int = 1) -> float:
    """Probability that none of a group's spot GPUs is preempted for `seconds`: exp(-lambda tau g)."""
    return math.exp(-hazard_per_gpu_s * seconds * gpus)


def draft_slots(budget_s: float, draft_s: float, num_workers: int, survives: float = 1.0) -> int:
    """Drafts that `num_workers` groups finish in the budget: sum over groups of floor(u T / tau)."""
    if budget_s <= 0 or draft_s <= 0:
        return 0
    return num_workers * math.floor(survives * budget_s / draft_s)
