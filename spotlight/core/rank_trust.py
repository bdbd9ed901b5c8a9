"""How far a stale, cheap draft's reward can be trusted to rank seeds, and which draft setting to use.

rho is the rank correlation between a seed's draft reward and the reward of its regenerated image. It is
measured on *random* control seeds: kept seeds are extremes and overstate it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spotlight.core.draft_cost import DraftSetting
from spotlight.core.select import Floats, normal_gain

_FIELLER = 1.06  # variance of Fisher's z of Spearman's rho is 1.06 / (n - 3)


@dataclass(frozen=True, slots=True)
class Rho:
    """A rank correlation with its 95 % interval; `pairs` is the effective number behind it."""

    mean: float
    low: float
    high: float
    pairs: float


class RankTrust:
    """Posterior of rho for one draft setting: Fisher z, with a prior and pairs that fade.

    The prior is `prior_rho`, worth `prior_pairs`; a pair's weight is multiplied by `discount` per
    iteration, so an arm that is not used grows uncertain again.
    """

    def __init__(
        self, *, prior_rho: float = 0.8, prior_pairs: float = 4.0, discount: float = 0.95, window: int = 1024
    ) -> None:
        self.prior_z, self.prior_pairs = math.atanh(prior_rho), prior_pairs
        self.discount, self.window = discount, window
        self._pairs: list[tuple[int, float, float]] = []

    def observe(self, draft: float, final: float, iteration: int) -> None:
        """Add a control pair: where its draft and its final reward stand among the prompt's drafts.

        Both are mid-rank shares less 1/2, in [-1/2, 1/2]: over random seeds of one prompt their mean is 0,
        so pairs of different prompts may be pooled without prompts' differences looking like agreement.
        """
        if math.isfinite(draft) and math.isfinite(final):
            self._pairs.append((iteration, draft, final))
            del self._pairs[: -self.window]

    def posterior(self, iteration: int) -> tuple[float, float, float]:
        """Mean and standard deviation of Fisher's z, and the effective number of pairs."""
        if not self._pairs:
            return self.prior_z, math.sqrt(_FIELLER / self.prior_pairs), 0.0
        ages, drafts, finals = (np.array(column) for column in zip(*self._pairs, strict=True))
        weights = self.discount ** np.maximum(iteration - ages, 0)
        # A pair near the middle says little; uniform ranks have a mean square of 1/12, and count as one.
        pairs = float((weights * drafts * drafts).sum()) * 12.0
        z = math.atanh(max(-0.999, min(0.999, _correlation(drafts, finals, weights))))
        worth = max(pairs - 3.0, 0.0)
        total = worth + self.prior_pairs
        return (worth * z + self.prior_pairs * self.prior_z) / total, math.sqrt(_FIELLER / total), pairs

    def rho(self, iteration: int) -> Rho:
        """The posterior as a correlation."""
        z, deviation, pairs = self.posterior(iteration)
        low, high = math.tanh(z - 1.96 * deviation), math.tanh(z + 1.96 * deviation)
        return Rho(math.tanh(z), low, high, pairs)

    def sample(self, iteration: int, rng: np.random.Generator) -> float:
        """One draw of rho from the posterior."""
        z, deviation, _ = self.posterior(iteration)
        return math.tanh(float(rng.normal(z, deviation)))

    def state(self) -> list[list[float]]:
        """What a checkpoint must hold, as plain values: the pairs with their iterations."""
        return [list(pair) for pair in self._pairs]

    def restore(self, state: list[list[float]]) -> None:
        """Go on from `state`."""
        self._pairs = [(int(age), draft, final) for age, draft, final in state]


class SettingBandit:
    """Discounted Thompson sampling over draft settings, with hysteresis and an off switch.

    An arm is worth (1 - rho²) + rho² c(n/k): cheaper drafts are more (n) but rank worse (rho). The arm in
    use is kept unless another is `hysteresis` better. When rho's mean is under `threshold` for every arm,
    exploration is off, and is tried again for one iteration every `retry_every`. In such a `trial` all
    kept seeds should be random ones: exploration being off it costs nothing, and it measures rho at once.
    """

    def __init__(
        self,
        settings: Sequence[DraftSetting],
        *,
        threshold: float = 0.3,
        retry_every: int = 20,
        hysteresis: float = 0.03,
        discount: float = 0.95,
    ) -> None:
        if not settings:
            raise ValueError("at least one draft setting is needed")
        self.threshold, self.retry_every, self.hysteresis = threshold, retry_every, hysteresis
        self.trust = {setting: RankTrust(discount=discount) for setting in settings}
        self.current = settings[0]
        self.off_since: int | None = None
        self.trial = False

    def choose(
        self, per_group: Mapping[DraftSetting, float], iteration: int, rng: np.random.Generator
    ) -> DraftSetting | None:
        """The setting of this iteration, or None while exploration is off.

        `per_group[s]` is n/k, the drafts per kept seed that setting s would allow. While off, every
        `retry_every` iterations the most promising setting is returned for a trial, and what the trial
        measured decides whether exploration goes on.
        """
        means = {s: trust.rho(iteration).mean for s, trust in self.trust.items()}
        if self.off_since is not None and not self.trial:
            self.trial = (iteration - self.off_since) % self.retry_every == 0
            return max(means, key=lambda s: means[s]) if self.trial else None
        self.trial = False
        if max(means.values()) < self.threshold:
            self.off_since = iteration if self.off_since is None else self.off_since
            return None
        self.off_since = None
        value = {s: _worth(trust.sample(iteration, rng), per_group[s]) for s, trust in self.trust.items()}
        best = max(value, key=lambda s: value[s])
        if value[best] > value[self.current] * (1.0 + self.hysteresis):
            self.current = best
        return self.current

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain values, by the settings' order."""
        arms = list(self.trust)
        pairs = [self.trust[arm].state() for arm in arms]
        switch = {"off_since": self.off_since, "trial": self.trial}
        return {"current": arms.index(self.current), **switch, "pairs": pairs}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with the same settings."""
        arms = list(self.trust)
        self.current = arms[state["current"]]
        self.off_since, self.trial = state["off_since"], bool(state["trial"])
        for arm, pairs in zip(arms, state["pairs"], strict=True):
            self.trust[arm].restore(pairs)


def _worth(rho: float, ratio: float) -> float:
    return (1.0 - rho * rho) + rho * rho * normal_gain(ratio)


def _correlation(x: Floats, y: Floats, weights: Floats) -> float:
    scale = math.sqrt(float((weights * x * x).sum()) * float((weights * y * y).sum()))
    return float((weights * x * y).sum()) / scale if scale > 0 else 0.0
