"""Group-relative advantages: how much better a sample is than the others of its prompt.

A_i = (r_i - mean of the group) / (std + 1e-4), with the population standard deviation of the group or of the
whole batch, clipped. What teaches nothing is left out and counted: a reward that is missing or not finite, a
group whose rewards are all equal, a group of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

EPSILON = 1e-4
EQUAL = 1e-8  # rewards closer than this are equal to rounding
LARGEST = float(np.finfo(np.float32).max)  # training is in fp32: what lies beyond is not finite there


@dataclass(frozen=True, slots=True)
class Advantages:
    """One value per sample, None for those that are not trained on, and what was left out."""

    values: tuple[float | None, ...]
    dropped_samples: int  # without a finite reward
    zero_variance_groups: int
    reward_mean: float  # over finite rewards; nan without any
    reward_std: float


def advantages(
    groups: Sequence[int],
    rewards: Sequence[Any],
    *,
    normalise: Literal["group", "batch"] = "group",
    clip: float = 5.0,
) -> Advantages:
    """Advantages of samples whose prompt rows are `groups` and whose rewards may be None, NaN or odd."""
    if len(groups) != len(rewards):
        raise ValueError(f"{len(groups)} groups but {len(rewards)} rewards")
    clean = np.array([_number(reward) for reward in rewards], dtype=np.float64)
    finite = np.abs(clean) <= LARGEST  # False for NaN
    rows = np.asarray(groups)
    batch_std = float(clean[finite].std()) if finite.any() else math.nan
    values: list[float | None] = [None] * len(clean)
    flat = 0
    for row in np.unique(rows[finite]):
        members = np.flatnonzero(finite & (rows == row))
        group = clean[members]
        if np.ptp(group) <= EQUAL:
            flat += 1
            continue
        std = float(group.std()) if normalise == "group" else batch_std
        scaled = np.clip((group - group.mean()) / (std + EPSILON), -clip, clip)
        for member, value in zip(members, scaled, strict=True):
            values[member] = float(value)
    mean = float(clean[finite].mean()) if finite.any() else math.nan
    return Advantages(tuple(values), int((~finite).sum()), flat, mean, batch_std)


def _number(value: Any) -> float:
    """A float, or NaN for what is no number: a string is a broken reward even when it reads like one."""
    if isinstance(value, str | bytes) or value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
