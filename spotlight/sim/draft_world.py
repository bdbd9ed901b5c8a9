"""Synthetic reward worlds in which draft policies are compared: who spends the same worker time better?

A world has prompts in categories, each with a reward law that drifts as training goes on. Everything
random (batches, rewards, draft and training times, workers coming and going) is drawn from the world's
seed and not from what a policy does, so that policies are compared in pairs on the same world.

A design check, not evidence about training: the laws are made up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from spotlight.core.draft_cost import TrainingBudget
from spotlight.core.draft_plan import DraftStats, Plan
from spotlight.core.draft_policies import Law
from spotlight.core.explore import DraftPlanner
from spotlight.core.select import Floats

FAMILIES = ("binary", "graded", "narrow", "continuous")
_GRID = np.linspace(-8.0, 8.0, 4001)
_CDF = np.array([NormalDist().cdf(x) for x in _GRID])
_LEVELS = np.linspace(0.0, 1.0, 11)


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Sizes of a world. Draft times have mean 1 s; `training_s` is the explorers' free time.

    `changes` workers come or
    go per iteration. `cut` ends training at that share of its usual time; the budget is told so only if `cut_known`.
    """

    family: str
    prompts: int = 600
    categories: int = 8
    batch: int = 24
    k: int = 8
    cap: int = 64
    iterations: int = 24
    warmup: int = 6
    drift: float = 0.05
    training_s: float = 16.0
    training_cv: float = 0.04
    draft_cv: float = 0.05
    workers: tuple[int, int] = (15, 30)
    changes: float = 1.2
    cut: float = 1.0
    cut_known: bool = False


@dataclass(frozen=True, slots=True)
class IterationResult:
    """One iteration: the final groups' mean variance, mean deviation and zero-variance share per rho."""

    variance: dict[float, float]
    deviation: dict[float, float]
    zero_share: dict[float, float]
    stats: DraftStats


def level_law(family: str, logit: float) -> Floats:
    """Cumulative probabilities of the 11 reward levels 0, 0.1 .. 1 for a prompt of that difficulty.

    binary: right or wrong. graded: like OCR, a bell and a peak at 1. narrow: unequal small deviations.
    """
    p = 1.0 / (1.0 + np.exp(-logit))
    if family == "binary":
        law = np.zeros(11)
        law[[0, 10]] = 1.0 - p, p
    elif family == "graded":
        law = np.exp(-0.5 * ((_LEVELS - p) / 0.22) ** 2)
        law *= (1.0 - 0.5 * p) / law.sum()
        law[10] += 0.5 * p
    elif family == "narrow":
        law = np.exp(-0.5 * ((_LEVELS - 0.5) / (0.02 + 0.10 * p)) ** 2)
    else:
        raise ValueError(f"no reward family {family!r}")
    return np.asarray(np.cumsum(law / law.sum()))


def reward_of(family: str, logit: float, offset: float) -> Callable[[Floats], Floats]:
    """Turns standard normal latents of a prompt into rewards.

    continuous: like PickScore, a prompt's own mean (`offset`) and deviation, skewed to the left.
    """
    if family == "continuous":
        deviation = 0.02 + 0.10 / (1.0 + np.exp(-logit))
        return lambda latent: offset + deviation * (latent - 0.25 * (latent * latent - 1.0))
    edges = _quantiles(level_law(family, logit))
    return lambda latent: _LEVELS[np.searchsorted(edges, latent)]


def run_world(
    spec: WorldSpec, seed: int, make: Callable[[dict[int, Law]], DraftPlanner], rhos: tuple[float, ...]
) -> list[IterationResult]:
    """Run a policy through a world and return the iterations after the warm-up.

    `make` gets the table of true reward laws by row, which is kept up to date, and returns a planner;
    only an oracle may look at the table. Finals are drawn for each rho; the planner sees the first's.
    """
    world = _World(spec, seed)
    planner = make(world.laws)
    results = [world.step(planner, iteration, rhos) for iteration in range(spec.iterations)]
    return results[spec.warmup :]


_Event: TypeAlias = tuple[float, int, int, tuple[int, int] | None]  # time, order, workers +-1, draft done


class _World:
    def __init__(self, spec: WorldSpec, seed: int) -> None:
        self.spec = spec
        rng = np.random.default_rng((seed, 0))
        self.category = rng.integers(spec.categories, size=spec.prompts)
        centre = rng.normal(-0.3, 1.6, spec.categories)
        self.logit = centre[self.category] + rng.normal(0.0, 1.0, spec.prompts)
        self.offset = rng.normal(0.5, 0.2, spec.prompts)
        self.laws: dict[int, Law] = {}
        self.budget = TrainingBudget()
        self.workers = int(rng.integers(spec.workers[0], spec.workers[1] + 1))
        self.seed = seed

    def step(self, planner: DraftPlanner, iteration: int, rhos: tuple[float, ...]) -> IterationResult:
        spec = self.spec
        rng = np.random.default_rng((self.seed, 1, iteration))
        self.logit += rng.normal(0.4 * spec.drift, spec.drift, spec.prompts) if spec.drift else 0.0
        rows = [int(row) for row in rng.choice(spec.prompts, spec.batch, replace=False)]
        rewards = {row: reward_of(spec.family, self.logit[row], self.offset[row]) for row in rows}
        self.laws.clear()
        self.laws.update({row: _law(rewards[row]) for row in rows})
        latent = rng.standard_normal((spec.batch, spec.cap + spec.k))
        training_s = spec.training_s * (1.0 + spec.training_cv * rng.standard_normal())
        told = self.budget.seconds()
        told = 0.8 * spec.training_s if told is None else told
        self.budget.observe(training_s)
        if spec.cut_known:
            told *= spec.cut
        planner.open(
            iteration, rows, [str(self.category[row]) for row in rows], 0, spec.k, 0.0, told, self.workers
        )
        drafts = {row: rewards[row](latent[i]) for i, row in enumerate(rows)}
        self._draft(planner, drafts, training_s * spec.cut, rng)
        plan = planner.close(training_s * spec.cut)
        return self._finish(planner, plan, rewards, latent, rng, rhos)

    def _draft(
        self, planner: DraftPlanner, rewards: dict[int, Floats], training_s: float, rng: np.random.Generator
    ) -> None:
        """Let the workers pull until training ends; now and then one is lost or joins."""
        spec = self.spec
        seconds = np.maximum(1.0 + spec.draft_cv * rng.standard_normal(4096), 0.2)
        events: list[_Event] = [(0.0, n, 0, None) for n in range(self.workers)]
        for now in rng.uniform(0.0, training_s, rng.poisson(spec.changes)).tolist():
            events.append((now, len(events), int(rng.choice([-1, 1])), None))
        heapq.heapify(events)
        order, lost = len(events), 0
        while events:
            now, _, change, draft = heapq.heappop(events)
            if now > training_s:
                return
            if change:
                before, self.workers = self.workers, int(np.clip(self.workers + change, *spec.workers))
                planner.set_workers(self.workers, now)
                lost += max(before - self.workers, 0)
                if self.workers <= before:
                    continue
            elif draft is not None and lost:
                lost -= 1
                planner.draft_returned(*draft)
                continue
            elif draft is not None:
                took = float(seconds[order % 4096])
                planner.draft_done(*draft, float(rewards[draft[0]][draft[1]]), took, now)
            for new in planner.next_drafts(1, now):
                order += 1
                heapq.heappush(events, (now + float(seconds[order % 4096]), order, 0, new))

    def _finish(
        self,
        planner: DraftPlanner,
        plan: Plan,
        rewards: dict[int, Callable[[Floats], Floats]],
        latent: Floats,
        rng: np.random.Generator,
        rhos: tuple[float, ...],
    ) -> IterationResult:
        noise = rng.standard_normal(latent.shape)
        variance, deviation, zero = {}, {}, {}
        for rho in rhos:
            final = rho * latent + np.sqrt(1.0 - rho * rho) * noise
            groups = []
            for i, group in enumerate(plan.groups):
                values = rewards[group.row](final[i, list(group.seeds)])
                groups.append(float(np.var(values, ddof=1)))
                if rho == rhos[0]:
                    for seed, value in zip(group.seeds, values.tolist(), strict=True):
                        planner.finals(group.row, seed, value)
            variance[rho] = float(np.mean(groups))
            deviation[rho] = float(np.mean(np.sqrt(groups)))
            zero[rho] = float(np.mean(np.array(groups) < 1e-12))
        planner.report()
        return IterationResult(variance, deviation, zero, plan.stats)


def cut_short(spec: WorldSpec, share: float, *, known: bool) -> WorldSpec:
    """The same world with training ending at `share` of its time, foreseen or not."""
    return replace(spec, cut=share, cut_known=known)


def _law(reward: Callable[[Floats], Floats]) -> Law:
    return lambda rng, shape: reward(rng.standard_normal(shape))


def _quantiles(cumulative: Floats) -> Floats:
    """Normal quantiles of cumulative probabilities (the last, 1, left out)."""
    return np.asarray(np.interp(cumulative[:-1], _CDF, _GRID))
