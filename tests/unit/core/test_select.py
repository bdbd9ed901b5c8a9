import math

import numpy as np
import pytest

from spotlight.core.select import (
    SELECTORS,
    best_worst,
    max_variance,
    max_variance_subset,
    normal_gain,
    random_subset,
    top_k,
)


def test_skewed_rewards_are_not_split_in_halves():
    rewards = [1.0] * 12 + [0.0, 0.1]
    assert set(max_variance_subset(rewards, 4)) >= {12, 13}
    # Three zeros among ones, k = 8: all three, not four of each.
    assert [i for i in max_variance_subset([0, 1, 1, 0, 1, 1, 1, 1, 1, 0], 8) if i in (0, 3, 9)] == [0, 3, 9]


def test_a_far_outlier_takes_one_place_and_the_other_side_the_rest():
    rewards = [0.0, 0.01, 0.02, 0.03, 0.04, 10.0]
    assert max_variance_subset(rewards, 4) == [0, 1, 2, 5]


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_failed_drafts_are_last_resort(name):
    select, rng = SELECTORS[name], np.random.default_rng(0)
    rewards = [None, 0.5, math.nan, 0.25, math.inf, -math.inf, 0.75]
    assert select(rewards, 3, rng) == [1, 3, 6]
    assert select(rewards, 5, rng) == [0, 1, 2, 3, 6]
    assert set(select(rewards, 2, rng)) < {1, 3, 6}


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_groups_smaller_than_k_are_taken_whole(name):
    select, rng = SELECTORS[name], np.random.default_rng(0)
    assert select([0.1, 0.2], 8, rng) == [0, 1]
    assert select([], 8, rng) == []
    assert select([None, None], 1, rng) == [0]


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_k_below_one_is_refused(name):
    with pytest.raises(ValueError, match="k must be at least 1"):
        SELECTORS[name]([0.1], 0, np.random.default_rng(0))


def test_equal_rewards_give_k_seeds_and_always_the_same():
    assert max_variance_subset([0.5] * 6, 4) == max_variance_subset([0.5] * 6, 4) == [0, 1, 4, 5]


def test_ties_do_not_depend_on_float_type_or_integers():
    assert max_variance_subset([0, 1, 0, 1, 1], 2) == max_variance_subset([0.0, 1.0, 0.0, 1.0, 1.0], 2)


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e9])
def test_a_common_offset_changes_nothing(offset):
    rng = np.random.default_rng(3)
    rewards = np.round(rng.random(20), 2)
    assert max_variance_subset((rewards + offset).tolist(), 8) == max_variance_subset(rewards.tolist(), 8)


def test_huge_rewards_do_not_overflow():
    assert max_variance_subset([1e308, -1e308, 0.0, 1.0], 2) == [0, 1]


def test_baselines():
    rewards = [0.3, 0.1, 0.9, 0.5, 0.7]
    assert best_worst(rewards, 4) == [0, 1, 2, 4]
    assert best_worst(rewards, 3) == [1, 2, 4]
    assert top_k(rewards, 2) == [2, 4]
    assert top_k([0.5, 0.5, 0.5], 2) == [0, 1]
    picks = {tuple(random_subset(rewards, 2, np.random.default_rng(s))) for s in range(50)}
    assert len(picks) == 10


def test_normal_gain_agrees_with_drawn_normals():
    z = np.random.default_rng(0).standard_normal((2000, 96))
    for ratio in (1.5, 2.0, 4.0):
        drawn = np.mean([max_variance(row[: int(24 * ratio)], 24) for row in z])
        assert normal_gain(ratio) == pytest.approx(drawn, rel=0.08)
    assert normal_gain(0.5) == normal_gain(1.0) == 1.0
