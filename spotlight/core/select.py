"""Which k of n drafted seeds of a prompt are worth regenerating and training on.

Rewards of `None`, NaN or infinity are failed drafts: they are taken only where nothing else is left.
Every selector returns `min(k, n)` distinct indices in ascending order and breaks ties by index alone,
so the choice depends on the rewards and not on the order in which they arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Rewards: TypeAlias = Sequence[float | None]
Selector: TypeAlias = Callable[[Rewards, int, np.random.Generator], list[int]]

# Two splits whose variances differ by less than this share are the same split up to rounding.
_TIE = 1e-12


def max_variance_subset(rewards: Rewards, k: int) -> list[int]:
    """Indices of the k rewards with the largest sample variance, in O(n log n).

    The best subset always is "i lowest and k - i highest" for some i in 0..k (PODS, arXiv 2504.13818),
    so it is found by sorting and scanning i. Of equally good splits the most even one is taken.
    """
    usable, spare = _split(rewards, k)
    if len(usable) <= k:
        return sorted(usable + spare[: k - len(usable)])
    order = _ascending(rewards, usable)
    values = np.array([rewards[i] for i in order], dtype=np.float64)
    spread = split_variances(_unit_scale(values), np.array(len(values)), k)
    best = np.flatnonzero(spread >= spread.max() * (1 - _TIE))
    low = int(min(best, key=lambda i: (abs(2 * i - k), i)))
    return sorted(order[:low] + order[len(order) - (k - low) :])


def best_worst(rewards: Rewards, k: int) -> list[int]:
    """The k/2 lowest and the k/2 highest (one more high for odd k): Sol-RL's rule, arXiv 2604.06916."""
    usable, spare = _split(rewards, k)
    order = _ascending(rewards, usable)
    if len(order) > k:
        order = order[: k // 2] + order[len(order) - (k - k // 2) :]
    return sorted(order + spare[: k - len(order)])


def top_k(rewards: Rewards, k: int) -> list[int]:
    """The k highest; of equal rewards the earlier index."""
    usable, spare = _split(rewards, k)
    order = sorted(usable, key=lambda i: (-float(rewards[i] or 0.0), i))[:k]
    return sorted(order + spare[: k - len(order)])


def random_subset(rewards: Rewards, k: int, rng: np.random.Generator) -> list[int]:
    """k usable rewards drawn without replacement: the honest baseline of every other selector."""
    usable, spare = _split(rewards, k)
    if len(usable) > k:
        usable = [int(i) for i in rng.choice(usable, size=k, replace=False)]
    return sorted(usable + spare[: k - len(usable)])


SELECTORS: dict[str, Selector] = {
    "max_variance": lambda rewards, k, _: max_variance_subset(rewards, k),
    "best_worst": lambda rewards, k, _: best_worst(rewards, k),
    "top_k": lambda rewards, k, _: top_k(rewards, k),
    "random": random_subset,
}


def split_variances(ascending: Floats, count: NDArray[np.int_], k: int) -> Floats:
    """Sample variance of "i lowest and k - i highest" for i = 0..k, as shape `(..., k + 1)`.

    `ascending` has shape `(..., n)`, sorted along its last axis, of which the first `count` (shape
    `(...)` or scalar, all >= k) are real and the rest padding. Variances have k - 1 degrees of freedom;
    k = 1 has none, and its variance is 0.
    """
    top_index = np.maximum(np.asarray(count)[..., None] - 1 - np.arange(k), 0)
    top_index = np.broadcast_to(top_index, (*ascending.shape[:-1], k))
    low, high = ascending[..., :k], np.take_along_axis(ascending, top_index, axis=-1)
    total = _prefix(low) + _prefix(high)[..., ::-1]
    square = _prefix(low * low) + _prefix(high * high)[..., ::-1]
    return np.maximum(square - total * total / k, 0.0) / max(k - 1, 1)


def max_variance(values: Floats, k: int) -> float:
    """Variance of the best k-subset of finite `values` (0 for fewer than k)."""
    if len(values) < k:
        return 0.0
    return float(split_variances(np.sort(values), np.array(len(values)), k).max())


def normal_gain(ratio: float) -> float:
    """c(n/k): variance of the k/2 lowest and k/2 highest of n normal draws, over that of k random ones.

    The second moment of a normal beyond its k/2n tail: 1 + q pdf(q) / (1 - cdf(q)).
    """
    if ratio <= 1.0:
        return 1.0
    normal = NormalDist()
    tail = 0.5 / ratio
    q = normal.inv_cdf(1.0 - tail)
    return 1.0 + q * normal.pdf(q) / tail


def usable_reward(reward: float | None) -> bool:
    """Whether a reward is a finite number."""
    return reward is not None and math.isfinite(reward)


def _split(rewards: Rewards, k: int) -> tuple[list[int], list[int]]:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    usable = [i for i, reward in enumerate(rewards) if usable_reward(reward)]
    taken = set(usable)
    return usable, [i for i in range(len(rewards)) if i not in taken]


def _ascending(rewards: Rewards, usable: list[int]) -> list[int]:
    return sorted(usable, key=lambda i: (float(rewards[i] or 0.0), i))


def _unit_scale(ascending: Floats) -> Floats:
    """Shift and scale to within [-1, 1]: the scan subtracts squares, which must not overflow or cancel."""
    peak = float(np.abs(ascending).max()) or 1.0
    unit = ascending / peak
    unit = unit - unit.mean()
    return unit / (float(np.abs(unit).max()) or 1.0)


def _prefix(values: Floats) -> Floats:
    """Sums of the first 0..k values along the last axis."""
    zero = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)
