"""The planner in synthetic worlds: the benchmark's bars on a smaller, paired sample."""

import numpy as np
import pytest

from spotlight.core.draft_policies import Oracle, phi
from spotlight.core.explore import DraftPlanner
from spotlight.sim.draft_world import FAMILIES, WorldSpec, cut_short, level_law, run_world

SMALL = {"batch": 12, "prompts": 200, "workers": (8, 15), "iterations": 8, "warmup": 3}
WORLDS = 6


def runs(spec, policy):
    def make(seed):
        return lambda laws: DraftPlanner(
            policy=Oracle(laws, phi("identity"), seed) if policy == "oracle" else policy, seed=seed
        )

    return [run_world(spec, seed, make(seed), (0.95,)) for seed in range(WORLDS)]


def variance(results):
    return np.array([np.mean([result.variance[0.95] for result in run]) for run in results])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_planner_beats_uniform_and_recovers_half_of_the_oracles_gap(family):
    spec = WorldSpec(family, **SMALL)
    planner, uniform, oracle = (runs(spec, p) for p in ("planner", "uniform", "oracle"))
    none = variance(runs(spec, "none"))
    gain = (variance(planner) - variance(uniform)) / none
    possible = (variance(oracle) - variance(uniform)) / none
    assert gain.mean() > 0
    assert gain.mean() / possible.mean() >= 0.5
    overrun = np.mean([result.stats.overrun for run in planner for result in run])
    assert overrun < 0.02
    used = np.mean(
        [result.stats.slots_used / result.stats.slots_offered for run in planner for result in run]
    )
    assert used > 0.8


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("cut", [0.25, 0.5, 0.75])
def test_an_early_end_costs_at_most_five_percent(cut):
    spec = WorldSpec("graded", **SMALL)
    unforeseen = variance(runs(cut_short(spec, cut, known=False), "planner"))
    known = variance(runs(cut_short(spec, cut, known=True), "planner"))
    assert 1.0 - (unforeseen / known).mean() <= 0.05


def test_ranking_by_variance_alone_is_worse_than_uniform_on_right_or_wrong_rewards():
    spec = WorldSpec("binary", **SMALL)
    assert variance(runs(spec, "variance")).mean() < variance(runs(spec, "uniform")).mean()


def test_worlds_do_not_depend_on_the_policy():
    spec = WorldSpec("graded", **{**SMALL, "changes": 0.0})
    laws = {}

    def make(policy):
        def planner(table):
            laws[policy] = table
            return DraftPlanner(policy=policy, seed=0)

        return planner

    for policy in ("none", "uniform"):
        run_world(spec, 3, make(policy), (0.95,))
    assert sorted(laws["none"]) == sorted(laws["uniform"])
    for row, law in laws["none"].items():
        draws = [table[row](np.random.default_rng(0), (2, 5)) for table in laws.values()]
        assert np.array_equal(*draws), law


@pytest.mark.parametrize("family", ["binary", "graded", "narrow"])
def test_level_laws_are_laws(family):
    for logit in (-50.0, -1.0, 0.0, 3.0, 50.0):
        law = level_law(family, logit)
        assert law[-1] == pytest.approx(1.0)
        assert (np.diff(law) >= 0).all()
    with pytest.raises(ValueError, match="no reward family"):
        level_law("other", 0.0)
