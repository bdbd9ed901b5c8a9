from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.rl.advantage import EPSILON, advantages

FINITE = st.floats(-100, 100)
ODD = [None, math.nan, math.inf, -math.inf, 1e300, 10**400, "0.5", b"1", [0.5], {}, object(), torch.zeros(2)]


def reference(groups, rewards, normalise):
    """One sample at a time, with the statistics module."""
    out = []
    for group, reward in zip(groups, rewards, strict=True):
        peers = [r for g, r in zip(groups, rewards, strict=True) if g == group]
        if max(peers) - min(peers) <= 1e-8:
            out.append(None)
            continue
        spread = statistics.pstdev(peers if normalise == "group" else rewards)
        out.append(max(-5.0, min(5.0, (reward - statistics.fmean(peers)) / (spread + EPSILON))))
    return out


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), FINITE), min_size=1, max_size=40),
    st.sampled_from(["group", "batch"]),
)
def test_it_matches_the_plain_formula(pairs, normalise):
    groups, rewards = zip(*pairs, strict=True)
    result = advantages(groups, rewards, normalise=normalise)
    expected = reference(groups, rewards, normalise)
    for value, right in zip(result.values, expected, strict=True):
        assert (value is None) == (right is None)
        assert value is None or value == pytest.approx(right, rel=1e-6, abs=1e-6)
    flat = {g for g, value in zip(groups, expected, strict=True) if value is None}
    assert result.zero_variance_groups == len(flat)
    assert result.dropped_samples == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), FINITE), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ODD)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from(["group", "batch"]),
)
def test_failed_rewards_change_nothing_for_the_others(good, bad, random, normalise):
    mixed = [(*pair, i) for i, pair in enumerate(good)] + [(*pair, None) for pair in bad]
    random.shuffle(mixed)
    result = advantages([m[0] for m in mixed], [m[1] for m in mixed], normalise=normalise)
    alone = advantages([g for g, _ in good], [r for _, r in good], normalise=normalise)
    assert result.dropped_samples == len(bad)
    assert result.zero_variance_groups == alone.zero_variance_groups
    for value, (_, _, index) in zip(result.values, mixed, strict=True):
        right = None if index is None else alone.values[index]
        assert (value is None) == (right is None)
        if value is not None:
            assert value == pytest.approx(right, rel=1e-6, abs=1e-9)
    assert result.reward_mean == pytest.approx(alone.reward_mean)


def test_equal_rewards_teach_nothing_and_are_counted():
    result = advantages([0, 0, 1, 1], [0.1 + 0.2, 0.3, 0.0, 1.0])
    assert result.values[:2] == (None, None)
    assert result.values[2:] == pytest.approx((-1, 1), abs=1e-3)
    assert result.zero_variance_groups == 1


def test_a_group_of_one_and_a_group_left_with_one_teach_nothing():
    result = advantages([7, 8, 8], [0.5, 0.5, None])
    assert result.values == (None, None, None)
    assert (result.zero_variance_groups, result.dropped_samples) == (2, 1)


def test_clip_bounds_outliers():
    result = advantages([0] * 100, [0.0] * 99 + [1.0], clip=3.0)
    assert max(result.values) == 3.0


def test_batch_normalisation_keeps_the_sizes_of_groups_apart():
    groups, rewards = [0, 0, 1, 1], [0.0, 0.1, 0.0, 1.0]
    by_group = advantages(groups, rewards).values
    by_batch = advantages(groups, rewards, normalise="batch").values
    assert by_group[1] == pytest.approx(by_group[3], rel=0.01)
    assert by_batch[3] / by_batch[1] == pytest.approx(10)


def test_numbers_of_other_libraries_are_numbers():
    result = advantages([0, 0, 0], [np.float32(0), torch.tensor(1.0), True])
    assert result.dropped_samples == 0
    assert result.reward_mean == pytest.approx(2 / 3)


def test_nothing_finite_at_all():
    result = advantages([0, 1], [None, math.nan])
    assert result.values == (None, None)
    assert math.isnan(result.reward_mean)
    assert advantages([], []).values == ()


def test_as_many_rewards_as_samples():
    with pytest.raises(ValueError, match="2 groups but 1"):
        advantages([0, 0], [1.0])
