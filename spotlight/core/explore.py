"""The exploration planner: which seeds to draft while the trainers train, and which of them to keep.

`DraftPlanner` is the draft source of the scheduler. One iteration:

    open(...)  ->  next_drafts / draft_done / draft_returned / set_workers ...  ->  close() -> Plan
    finals(...) for the regenerated seeds, then report()

Drafts only ever return seeds and rewards: a wrong plan costs selection quality, never correctness. The
planner has no clock and does no I/O; equal seeds and equal calls give equal plans. With
`drafts_per_prompt` set, a plan depends on the rewards alone and not on the order in which they came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spotlight.core.belief import RewardBelief
from spotlight.core.draft_book import DraftBook
from spotlight.core.draft_cost import DraftCost, DraftSetting, draft_slots, survival
from spotlight.core.draft_plan import DraftStats, ExploreReport, KeptGroup, Plan, keep_seeds, variances
from spotlight.core.draft_policies import (
    FixedPool,
    NoDrafts,
    Phi,
    Planner,
    Policy,
    StdProportional,
    Uniform,
    VarianceGreedy,
    phi,
)
from spotlight.core.draft_review import DraftReview
from spotlight.core.rank_trust import SettingBandit
from spotlight.core.select import SELECTORS, usable_reward


def make_policy(name: str, belief: RewardBelief, value: Phi, pool: int = 96) -> Policy:
    """The policy of that name. Raises ValueError for an unknown one."""
    if name == "planner":
        return Planner(belief, value)
    if name == "best_worst":
        return FixedPool(pool)
    plain: dict[str, type[NoDrafts | Uniform | StdProportional | VarianceGreedy]] = {
        "none": NoDrafts,
        "uniform": Uniform,
        "std": StdProportional,
        "variance": VarianceGreedy,
    }
    if name not in plain:
        raise ValueError(f"no policy {name!r}; there are: {', '.join([*plain, 'best_worst', 'planner'])}")
    return plain[name]()


class DraftPlanner:
    """Hands out drafts by priority, learns from their rewards, keeps the best k seeds of each prompt.

    `policy` is a name of `make_policy` or a Policy; `value` the phi of the planner. `max_drafts` caps the
    drafts of a prompt; `drafts_per_prompt` replaces the time budget by a fixed count. `control_share` of
    the kept seeds are random ones. `hazard_per_gpu_s` is the preemption rate used when counting slots.
    """

    def __init__(
        self,
        *,
        policy: str | Policy = "planner",
        seed: int = 0,
        value: str = "identity",
        max_drafts: int = 64,
        drafts_per_prompt: int | None = None,
        control_share: float = 0.02,
        settings: Sequence[DraftSetting] = (DraftSetting(steps=10, height=512, width=512),),
        hazard_per_gpu_s: float = 0.0,
        pool: int = 96,
    ) -> None:
        self.belief = RewardBelief(seed=seed)
        self.cost = DraftCost()
        self.bandit = SettingBandit(settings)
        self.setting: DraftSetting | None = None
        if drafts_per_prompt and policy in ("planner", "std", "variance"):
            policy = "uniform"  # with as many drafts for every prompt their order does not matter
        self._policy = (
            make_policy(policy, self.belief, phi(value), pool) if isinstance(policy, str) else policy
        )
        self._seed, self._control_share, self._hazard = seed, control_share, hazard_per_gpu_s
        self._fixed, self._cap = drafts_per_prompt, drafts_per_prompt or max_drafts
        self._book: DraftBook | None = None
        self._review: DraftReview | None = None
        self._taught = self._exhausted = False

    # ---- while the trainers train ---------------------------------------------------------------

    def open(
        self,
        iteration: int,
        rows: Sequence[int],
        categories: Sequence[str],
        first_seed: int,
        k: int,
        now: float,
        budget_s: float,
        num_workers: int,
    ) -> DraftSetting | None:
        """Begin drafting for the groups of `rows`; returns the setting to draft with, None for no drafts.

        Seeds are first_seed, first_seed + 1, ... per row. Also without drafts `close` must follow; its plan
        is fresh seeds then. Raises ValueError for repeated or negative rows,
        and when the last iteration is still open.
        """
        if self._book is not None:
            raise ValueError(f"iteration {self._book.iteration} is still open")
        book = DraftBook(iteration, tuple(rows), tuple(categories), first_seed, k, self._cap)
        self._clock = _Clock(now, now + budget_s, num_workers, now)
        self.setting = self._choose(book, budget_s)
        self._book = book
        self._failed = self._returned = 0
        self._exhausted = False
        self._used_s = 0.0
        self._policy.open(book)
        return self.setting

    def set_workers(self, num_workers: int, now: float) -> None:
        """Groups were lost or joined: the slots that are left shrink or grow."""
        if self._book is not None:
            self._clock.tick(now)
            self._clock.num_workers = num_workers

    def next_drafts(self, max_requests: int, now: float) -> list[tuple[int, int]]:
        """Up to `max_requests` pairs (row, seed), best first; fewer when none fits or none is left."""
        book = self._book
        if book is None or self.setting is None or not self._fits(now):
            return []
        drafts: list[tuple[int, int]] = []
        while len(drafts) < max_requests:
            if book.returned:
                drafts.append(book.retake(now))
            elif (i := self._best(book, now)) is not None:
                drafts.append(book.take(i, now))
            else:
                self._exhausted = True
                break
        return drafts

    def draft_done(self, row: int, seed: int, reward: float | None, cost_s: float, now: float) -> None:
        """A draft came back. Unknown, repeated and late ones are ignored; None or non-finite is failed."""
        book = self._book
        i = book.answer(row, seed, reward) if book is not None else None
        if i is None:
            return
        if self.setting is not None:
            self.cost.observe(self.setting, cost_s)
        self._used_s += cost_s if math.isfinite(cost_s) else 0.0
        if usable_reward(reward):
            self.belief.see(float(reward or 0.0))
        else:
            self._failed += 1
        self._policy.changed(i)

    def draft_returned(self, row: int, seed: int) -> None:
        """A draft was given up, by a preemption say; it is the next to be handed out again."""
        if self._book is not None and self._book.give_back(row, seed):
            self._returned += 1

    @property
    def complete(self) -> bool:
        """Whether nothing is out and nothing more will be handed out, time aside.

        That a policy wants no more is known once a pull has come back empty.
        """
        book = self._book
        if book is None or self.setting is None:
            return True
        out = any(book.in_flight) or book.returned
        return not out and (self._exhausted or bool((book.issued >= self._cap).all()))

    # ---- when training ends ---------------------------------------------------------------------

    def close(self, now: float) -> Plan:
        """End drafting and choose the k seeds of every row. Drafts that are still out no longer count."""
        book = self._book
        if book is None:
            raise ValueError("no iteration is open")
        self._book = None
        self._clock.tick(now)
        share = 1.0 if self.bandit.trial else self._control_share
        groups = keep_seeds(book, SELECTORS[self._policy.selector], share, self._seed)
        plan = Plan(book.iteration, groups, self._stats(book, groups, now))
        for i, (row, category) in enumerate(zip(book.rows, book.categories, strict=True)):
            self.belief.learn(row, category, book.rewards(i), book.iteration)
        self.report()  # learns from the last plan's finals, if no one has asked
        self._review, self._taught = DraftReview(book, plan, self.setting), False
        return plan

    def finals(self, row: int, seed: int, reward: float | None) -> None:
        """The reward of a regenerated seed of the last plan; others and failed ones are ignored."""
        if self._review is not None and usable_reward(reward):
            self._review.finals[row, seed] = float(reward or 0.0)

    def report(self) -> ExploreReport | None:
        """Figures of the last closed plan, with the finals given so far; learns rho from them once.

        None before the first plan. Call it when the roll-out's rewards are in.
        """
        review = self._review
        if review is None:
            return None
        setting = review.setting or self.bandit.current
        trust = self.bandit.trust[setting]
        if not self._taught:
            review.teach(trust)
            self._taught = True
        return review.report(trust.rho(review.plan.iteration), self._note(review.plan.iteration))

    def state(self) -> dict[str, Any]:
        """What a checkpoint between two iterations must hold, as plain JSON values."""
        return {"belief": self.belief.state(), "cost": self.cost.state(), "bandit": self.bandit.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state` in a planner made with the same arguments."""
        self.belief.restore(state["belief"])
        self.cost.restore(state["cost"])
        self.bandit.restore(state["bandit"])

    # ---- inside ---------------------------------------------------------------------------------

    def _choose(self, book: DraftBook, budget_s: float) -> DraftSetting | None:
        if isinstance(self._policy, NoDrafts):
            return None
        groups = max(len(book.rows), 1)
        per_prompt = {s: min(self._slots(s, budget_s) / groups, self._cap) for s in self.bandit.trust}
        per_kept = {setting: number / book.k for setting, number in per_prompt.items()}
        rng = np.random.default_rng((self._seed, book.iteration, 1))
        return self.bandit.choose(per_kept, book.iteration, rng)

    def _slots(self, setting: DraftSetting, budget_s: float) -> float:
        """Drafts of that setting that fit into `budget_s` with the workers of now."""
        draft_s = self.cost.predict(setting)
        if self._fixed is not None or draft_s is None:
            return math.inf
        survives = survival(self._hazard, draft_s)
        return draft_slots(budget_s, draft_s, self._clock.num_workers, survives)

    def _fits(self, now: float) -> bool:
        """Whether a draft begun now very likely ends in the budget."""
        if self._fixed is not None or self.setting is None:
            return True
        return now + (self.cost.high(self.setting) or 0.0) <= self._clock.deadline

    def _best(self, book: DraftBook, now: float) -> int | None:
        left = self._slots(self.setting, self._clock.deadline - now) if self.setting else 0.0
        priority = np.where(book.issued < self._cap, self._policy.priority(book, left), -np.inf)
        best = float(priority.max(initial=-np.inf))
        if best == -np.inf:
            return None
        equal = np.flatnonzero(priority == best)
        return int(equal[np.argmin(book.issued[equal])])

    def _note(self, iteration: int) -> str:
        since = self.bandit.off_since
        if since is None:
            return ""
        rho = self.bandit.trust[self.bandit.current].rho(iteration)
        return (
            f"exploration is off since iteration {since}: drafts rank seeds too badly "
            f"(rho {rho.mean:.2f}, {rho.low:.2f} to {rho.high:.2f}; {self.bandit.threshold} is needed)"
        )

    def _stats(self, book: DraftBook, groups: tuple[KeptGroup, ...], now: float) -> DraftStats:
        draft_s = (self.cost.predict(self.setting) if self.setting else None) or 0.0
        out = [begun for i in range(len(book.rows)) for begun in book.in_flight[i].values()]
        owed = sum(max(begun + draft_s - now, 0.0) for begun in out)
        offered = self._clock.offered_s
        pairs = [variances(book, i, group) for i, group in enumerate(groups) if group.num_drafts > 1]
        kept, everyone = np.array(pairs).reshape(-1, 2).T
        return DraftStats(
            slots_offered=int(offered / draft_s) if draft_s else 0,
            slots_used=sum(len(known) for known in book.answered),
            failed=self._failed,
            cancelled=len(out) + len(book.returned),
            returned=self._returned,
            budget_s=self._clock.deadline - self._clock.opened,
            used_s=self._used_s,
            overrun=owed / offered if offered > 0 else 0.0,
            kept_variance=float(kept.mean()) if len(kept) else 0.0,
            random_variance=float(everyone.mean()) if len(kept) else 0.0,
            zero_variance_share=float((kept == 0).mean()) if len(kept) else 0.0,
        )


@dataclass(slots=True)
class _Clock:
    """The time budget of an iteration, and the worker time it offered so far."""

    opened: float
    deadline: float
    num_workers: int
    since: float
    offered_s: float = 0.0

    def tick(self, now: float) -> None:
        """Count the worker time up to `now`."""
        self.offered_s += self.num_workers * max(now - self.since, 0.0)
        self.since = max(now, self.since)
