"""Rewards behind one protocol, their registry, and the weighted sum that is trained on.

A score is a finite float, higher is better, or None: the reward *failed* on that image. A failed score is
never 0 and never averaged; the sample is dropped and counted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from spotlight.errors import ConfigError
from spotlight.rl.registry import REWARDS, WITH_WEIGHTS, resolve

Metadata = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scores:
    """One value per image, and lists of the same length to look at (readings, parts, reasons)."""

    values: list[float | None]
    info: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """How many images have no score."""
        return sum(value is None for value in self.values)


@runtime_checkable
class Reward(Protocol):
    """Scores images against their prompts."""

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Score `images` (B, 1 or 3, H, W) in [0, 1]. Deterministic; independent of the batch."""
        ...


def load_reward(name: str) -> Reward:
    """A shipped reward by name, a remote one by URL, or the user's own `module:name`.

    Behind a shipped name `@` says which weights it uses: `clip@FOLDER`, `clip@owner/name`,
    `clip@owner/name@revision`.
    The user's own is a function `(images, prompts, metadata) -> scores` or a class with `score`; scores are a
    list, an array, a tensor or `Scores`. Raises ConfigError.
    """
    if name.startswith(("http://", "https://")):
        return resolve("spotlight.rl.rewards.remote:RemoteReward", {}, "reward")(name)
    known, _, source = name.partition("@")
    if source and known in WITH_WEIGHTS:
        return resolve(known, REWARDS, "reward")(source)
    found = resolve(name, REWARDS, "reward")
    if name in REWARDS or inspect.isclass(found):
        found = found()
    if isinstance(found, Reward):
        return found
    if not callable(found):
        raise ConfigError(f"reward {name!r} is neither a function nor a class with a `score` method")
    return _FunctionReward(name, found)


def combine(weights: Mapping[str, float]) -> Reward:
    """The weighted sum of several rewards; failed where any part failed. Raises ConfigError."""
    if not weights:
        raise ConfigError("reward.train names no reward", hint=f"known: {', '.join(sorted(REWARDS))}")
    return _WeightedSum({name: (load_reward(name), weight) for name, weight in weights.items()})


def sane(values: Any, count: int) -> list[float | None]:
    """Whatever a reward returned, as `count` finite floats or None.

    NaN, infinity, None and what is no number are failed scores. A wrong number of scores fails all of them:
    nobody knows which belongs to which image.
    """
    if isinstance(values, Tensor) or hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple) or len(values) != count:
        return [None] * count
    return [_finite(value) for value in values]


def _finite(value: Any) -> float | None:
    if isinstance(value, Tensor) or hasattr(value, "tolist"):  # a zero-dimensional tensor or numpy scalar
        value = value.tolist()
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None


class _FunctionReward:
    """A user's function. Its exceptions and odd values are failed scores with the reason beside them."""

    def __init__(self, name: str, function: Any) -> None:
        self._name = name
        self._function = function

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        try:
            result = self._function(images, prompts, metadata)
        except Exception as error:  # noqa: BLE001 - foreign code: one bad image must not end a run
            return Scores([None] * len(images), {"error": [f"{self._name}: {error!r}"[:300]] * len(images)})
        if isinstance(result, Scores):
            return Scores(sane(result.values, len(images)), result.info)
        return Scores(sane(result, len(images)))


class _WeightedSum:
    def __init__(self, parts: Mapping[str, tuple[Reward, float]]) -> None:
        self._parts = parts

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        totals: list[float | None] = [0.0] * len(images)
        info: dict[str, list[Any]] = {}
        for name, (reward, weight) in self._parts.items():
            part = reward.score(images, prompts, metadata)
            values = sane(part.values, len(images))
            info[name] = values
            info |= {f"{name}.{key}": column for key, column in part.info.items()}
            totals = [
                None if total is None or value is None else total + weight * value
                for total, value in zip(totals, values, strict=True)
            ]
        return Scores(totals, info)
