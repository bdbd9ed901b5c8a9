"""What the regenerated images' rewards say about an iteration's drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from spotlight.core.draft_book import DraftBook
from spotlight.core.draft_cost import DraftSetting
from spotlight.core.draft_plan import ExploreReport, KeptGroup, Plan
from spotlight.core.rank_trust import RankTrust, Rho
from spotlight.core.select import Floats

_ENOUGH = 4  # drafts of a prompt from which its mean and deviation can be had


@dataclass(slots=True)
class DraftReview:
    """Collects final rewards of one plan by (row, seed), then compares them with the drafts'."""

    book: DraftBook
    plan: Plan
    setting: DraftSetting | None
    finals: dict[tuple[int, int], float] = field(default_factory=dict)

    def teach(self, trust: RankTrust) -> None:
        """Give the control seeds' (draft, final) pairs to the posterior of rho."""
        for group in self.plan.groups:
            drafts = np.sort(self.book.rewards(self.book.index[group.row]))
            for draft, final in self._pairs(group, group.control):
                trust.observe(standing(draft, drafts), standing(final, drafts), self.plan.iteration)

    def report(self, rho: Rho, note: str) -> ExploreReport:
        """The iteration's report; variances of groups with fewer than two finals are left out."""
        variances = [self._final_variance(group) for group in self.plan.groups]
        known = np.array([v for v in variances if v is not None])
        return ExploreReport(
            stats=self.plan.stats,
            setting=self.setting,
            rho=rho,
            kept_slope=self._kept_slope(),
            final_variance=float(known.mean()) if len(known) else 0.0,
            final_zero_variance_share=float((known == 0).mean()) if len(known) else 0.0,
            note=note,
        )

    def _kept_slope(self) -> float | None:
        """Slope of final on draft reward over all kept seeds, each standardised by its prompt's drafts."""
        product = square = 0.0
        for group in self.plan.groups:
            drafts = self.book.rewards(self.book.index[group.row])
            for draft, final in self._pairs(group, group.seeds):
                mean, variance = float(drafts.mean()), float(drafts.var(ddof=1))
                product += (draft - mean) * (final - mean) / variance
                square += (draft - mean) ** 2 / variance
        return product / square if square > 0 else None

    def _pairs(self, group: KeptGroup, seeds: tuple[int, ...]) -> list[tuple[float, float]]:
        """(draft, final) rewards of these seeds.

        None for prompts whose drafts are few or all equal: they say nothing about ranks. All drafts of a
        prompt are a random sample, so where a reward stands among them is not biased by picking.
        """
        i = self.book.index[group.row]
        rewards = self.book.rewards(i)
        if len(rewards) < _ENOUGH or float(np.ptp(rewards)) == 0.0:
            return []
        pairs = []
        for seed in seeds:
            draft = self.book.answered[i].get(seed - self.book.first_seed)
            final = self.finals.get((group.row, seed))
            if draft is not None and final is not None:
                pairs.append((draft, final))
        return pairs

    def _final_variance(self, group: KeptGroup) -> float | None:
        found = [self.finals[group.row, seed] for seed in group.seeds if (group.row, seed) in self.finals]
        return float(np.var(found, ddof=1)) if len(found) > 1 else None


def standing(reward: float, ascending: Floats) -> float:
    """Mid-rank of a reward among sorted others, as a share less 1/2: -1/2 below all, 1/2 above all."""
    below = np.searchsorted(ascending, reward, side="left")
    upto = np.searchsorted(ascending, reward, side="right")
    return float(below + upto) / (2.0 * len(ascending)) - 0.5
