from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.core.select import SELECTORS, max_variance, max_variance_subset

levels = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])
reals = st.floats(-100, 100, allow_nan=False, width=32)


def variance(values):
    return float(np.var(values, ddof=1)) if len(values) > 1 else 0.0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(levels, min_size=1, max_size=14) | st.lists(reals, min_size=1, max_size=14), st.integers(1, 8)
)
def test_the_subset_equals_brute_force(rewards, k):
    k = min(k, len(rewards))
    chosen = max_variance_subset(rewards, k)
    best = max(variance(subset) for subset in combinations(rewards, k))
    assert len(set(chosen)) == k
    assert np.isclose(variance([rewards[i] for i in chosen]), best, rtol=1e-9, atol=1e-9)
    assert np.isclose(max_variance(np.array(rewards), k), best, rtol=1e-6, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(SELECTORS)),
    st.lists(st.none() | st.floats() | levels, max_size=20),
    st.integers(1, 10),
    st.integers(0, 3),
)
def test_every_selector_keeps_min_k_n_distinct_and_failed_ones_only_when_short(name, rewards, k, seed):
    chosen = SELECTORS[name](rewards, k, np.random.default_rng(seed))
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(k, len(rewards))
    usable = {i for i, r in enumerate(rewards) if r is not None and np.isfinite(r)}
    if len(usable) >= k:
        assert set(chosen) <= usable
    else:
        assert usable <= set(chosen)
