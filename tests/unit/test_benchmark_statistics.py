"""The figures of the exploration benchmarks, against computations that share nothing with them."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module(name)
    for added in [m for m in set(sys.modules) - before if "." not in m and (BENCHMARKS / f"{m}.py").exists()]:
        del sys.modules[added]


@pytest.fixture
def draft_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from load("draft_rank", monkeypatch)


@pytest.fixture
def time_to_target(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from load("time_to_target", monkeypatch)


@pytest.fixture
def exploration(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from load("exploration", monkeypatch)


def rewards(rng: np.random.Generator, levels: int, shape: tuple[int, ...]) -> np.ndarray:
    """Rewards with ties, as edit distances have them, or (0 levels) without."""
    return rng.integers(levels, size=shape) / levels if levels else rng.random(shape)


@pytest.mark.parametrize("levels", [0, 2, 4])
def test_spearman_is_scipys_row_by_row(draft_rank: ModuleType, levels: int) -> None:
    rng = np.random.default_rng(levels)
    a, b = rewards(rng, levels, (30, 12)), rewards(rng, levels, (30, 12))
    expected = [stats.spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)]
    assert draft_rank.spearman(a, b) == pytest.approx(np.array(expected), nan_ok=True)


def test_a_prompt_whose_rewards_are_all_equal_has_no_correlation(draft_rank: ModuleType) -> None:
    a, b = np.array([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]]), np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    rho = draft_rank.spearman(a, b)
    assert math.isnan(rho[0])
    assert rho[1] == pytest.approx(-1)


@pytest.mark.parametrize("levels", [0, 4])
def test_contrast_is_what_trying_every_subset_gives(draft_rank: ModuleType, levels: int) -> None:
    rng = np.random.default_rng(levels)
    draft, final, k = rewards(rng, levels, (5, 8)), rewards(rng, levels, (5, 8)), 3
    picked, oracle, random = draft_rank.contrast(draft, final, k)
    for row in range(len(final)):
        subsets = [list(s) for s in itertools.combinations(range(8), k)]
        of_draft = [np.var(draft[row][s], ddof=1) for s in subsets]
        of_final = [np.var(final[row][s], ddof=1) for s in subsets]
        assert oracle[row] == pytest.approx(max(of_final))
        assert random[row] == pytest.approx(np.mean(of_final))  # random seeds, on average over all subsets
        best = [v for s, v in zip(of_draft, of_final, strict=True) if s == pytest.approx(max(of_draft))]
        assert any(picked[row] == pytest.approx(v) for v in best)  # of equally good subsets any one


def test_a_draft_that_is_the_final_recovers_everything_and_noise_nothing(draft_rank: ModuleType) -> None:
    rng = np.random.default_rng(0)
    final = rng.random((2, 400, 24))
    same = draft_rank.summary(draft_rank.measure(final, final))
    assert same["rho"] == [1, 1, 1]
    assert same["recovered"] == [1, 1, 1]
    assert same["kept"] == same["oracle"]
    noise = draft_rank.summary(draft_rank.measure(rng.random(final.shape), final))
    for name, value in (("rho", 0), ("recovered", 0), ("kept", 1)):
        mean, low, high = noise[name]
        assert low <= mean <= high
        assert mean == pytest.approx(value, abs=0.03)


# ---- time to a target ------------------------------------------------------------------------------


def row(seed: int, curve: list[tuple[int, float]], iteration_s: float = 1.0) -> dict[str, Any]:
    times = {"iteration_s": iteration_s, "on_demand_iteration_s": 2 * iteration_s, "horizon": 40}
    return {"arm": "a", "set": "", "seed": seed, "drafts_per_prompt": 0.0, **times, "curve": curve}


def to(iterations: float) -> list[tuple[int, float]]:
    """A straight curve from 0.5 that reaches 0.8 after so many iterations."""
    return [(0, 0.5), (100, 0.5 + 30 / iterations)]


def test_a_target_between_validations_is_found_on_the_line(time_to_target: ModuleType) -> None:
    curve = [(0, 0.5), (4, 0.7), (8, 0.6), (12, 0.9)]
    assert time_to_target.reached(curve, 0.6) == pytest.approx(2)
    assert time_to_target.reached(curve, 0.8) == pytest.approx(8 + 4 * 2 / 3)
    assert time_to_target.reached(curve, 0.95) is None


def test_intervals_are_scipys(time_to_target: ModuleType) -> None:
    values = [3.0, 5.0, 4.0, 8.0, 6.5]
    found = time_to_target.interval(values)
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert (found["low"], found["high"]) == pytest.approx((low, high))


def test_seeds_that_never_arrive_count_with_the_whole_horizon(time_to_target: ModuleType) -> None:
    rows = [row(0, to(10)), row(1, [(0, 0.5), (4, 0.3)])]  # the second collapsed and was stopped
    found = time_to_target.restricted(rows, 0.8, None)
    assert (found["mean"], found["reached"], found["bound"]) == (
        pytest.approx((10 + 40) / 2),
        "1/2",
        "at least",
    )


def test_ratios_are_paired_by_seed_and_say_what_censoring_does_to_them(time_to_target: ModuleType) -> None:
    slow = [row(seed, to(n)) for seed, n in ((0, 20), (1, 32))]
    fast = [row(seed, to(n), iteration_s=0.5) for seed, n in ((1, 8), (0, 10))]
    same = "iteration_s", "iteration_s"
    found = time_to_target.ratio(slow, fast, 0.8, same)
    assert found["mean"] == pytest.approx(math.sqrt(20 / 5 * 32 / 4))
    assert found["bound"] == "exact"
    never = [(0, 0.5), (44, 0.6)]
    assert time_to_target.ratio([row(0, never)], fast, 0.8, same)["mean"] == pytest.approx(40 / 5)
    assert time_to_target.ratio([row(0, never)], fast, 0.8, same)["bound"] == "at least"
    assert time_to_target.ratio(slow, [row(0, never)], 0.8, same)["bound"] == "at most"
    assert time_to_target.ratio([row(0, never)], [row(0, never)], 0.8, same)["bound"] == "unknown"


def test_hardware_time(exploration: ModuleType, tmp_path: Path) -> None:
    clock = exploration.Clock(tmp_path / "clock.json", spot=4)
    config = exploration.configuration.load("tiny", ["explore.policy=planner"])
    pool = exploration.configuration.load("tiny", ["explore.policy=best_worst"])
    names = "image in 4 steps", "training on 8 x 8, flow_grpo, 0 steps"
    clock.costs = dict(zip(names, (0.01, 1.0), strict=True))
    assert clock.iteration_s(config, 5) == pytest.approx(0.13 + 1)  # 64 images on 5 GPUs: 13 in turn
    assert clock.iteration_s(config, 1) == pytest.approx(0.64 + 1)
    assert clock.iteration_s(pool, 5) == pytest.approx(0.52 + 1)  # 256 images


def test_speed_and_money_against_the_best_arm_without_exploration(time_to_target: ModuleType) -> None:
    plain, best, explored = (("none", "none", 30), ("fast", "none", 20), ("planner", "planner", 10))
    rows = [
        {**row(0, to(n)), "arm": name, "set": f"explore.policy={policy}"}
        for name, policy, n in (plain, best, explored)
    ]
    summary = time_to_target.summarise(rows, [0.8], spot=4, spot_price=0.25)
    assert summary["fast, on-demand only"]["wall_s_to_target"]["0.8"]["mean"] == pytest.approx(40)
    planner = summary["planner"]
    assert planner["speedup_same_machines"]["0.8"]["over"] == "fast"
    assert planner["wall_s_to_target"]["0.8"]["mean"] == pytest.approx(10)
    assert planner["cost_to_target"]["0.8"]["mean"] == pytest.approx(20)
    assert planner["speedup_same_machines"]["0.8"]["mean"] == pytest.approx(2)
    assert planner["speedup_on_demand_only"]["0.8"]["mean"] == pytest.approx(4)
    assert planner["saving_on_demand_only"]["0.8"]["mean"] == pytest.approx(2)


def test_the_published_summary_follows_from_the_published_rows(time_to_target: ModuleType) -> None:
    results = BENCHMARKS / "results"
    published = json.loads((results / "exploration.json").read_text())
    rows = [json.loads(line) for line in (results / "exploration.jsonl").read_text().splitlines()]
    targets = [float(t) for t in published["arms"]["none"]["iterations_to_target"]]
    summary = time_to_target.summarise(rows, targets, published["spot"], published["spot_price"])
    assert time_to_target.short(summary) == published["arms"]
