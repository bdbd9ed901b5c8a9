"""Whatever a reward returns, a failed score is never a number; sums; the user's own rewards."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from spotlight.errors import ConfigError
from spotlight.rl.rewards import Scores, combine, load_reward, sane


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module of a user, with rewards of every kind in it."""
    module = types.ModuleType("my_rewards")

    class Classy:
        def score(self, images: Any, prompts: Any, metadata: Any) -> Scores:
            return Scores([2.0] * len(prompts), {"who": ["classy"] * len(prompts)})

    def raises(images: Any, prompts: Any, metadata: Any) -> Any:
        raise RuntimeError("no such image")

    module.brightness = lambda images, prompts, metadata: images.mean(dim=(1, 2, 3))  # type: ignore[attr-defined]
    module.lengths = lambda images, prompts, metadata: [len(p) for p in prompts]  # type: ignore[attr-defined]
    module.odd = lambda images, prompts, metadata: [1.0, math.nan, "0.5"]  # type: ignore[attr-defined]
    module.full = lambda images, prompts, metadata: Scores([1.0, None, math.inf])  # type: ignore[attr-defined]
    module.few = lambda images, prompts, metadata: [1.0]  # type: ignore[attr-defined]
    module.number = 7  # type: ignore[attr-defined]
    module.raises, module.Classy = raises, Classy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module


IMAGES = torch.stack([torch.full((1, 2, 2), value) for value in (0.0, 0.5, 1.0)])
PROMPTS, METADATA = ["a", "bb", "ccc"], [{}, {}, {}]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, 0.5, True], [1.0, 0.5, 1.0]),
        ([math.nan, math.inf, -math.inf], [None, None, None]),
        ([None, "1.0", [1.0]], [None, None, None]),
        (torch.tensor([1.0, 2.0, math.nan]), [1.0, 2.0, None]),
        (np.array([1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]),
        ([np.float32(0.5), torch.tensor(0.25), torch.tensor([1.0, 2.0])], [0.5, 0.25, None]),
        ([1.0, 2.0], [None] * 3),
        ([1.0] * 4, [None] * 3),
        (torch.tensor(1.0), [None] * 3),
        (None, [None] * 3),
        ("abc", [None] * 3),
        ({0: 1.0, 1: 1.0, 2: 1.0}, [None] * 3),
    ],
)
def test_odd_scores_fail_and_never_count_as_zero(returned: Any, expected: list[float | None]) -> None:
    assert sane(returned, 3) == expected


def test_a_users_function_may_return_what_it_likes(plugin: types.ModuleType) -> None:
    def score(name: str) -> list[float | None]:
        return load_reward(f"my_rewards:{name}").score(IMAGES, PROMPTS, METADATA).values

    assert score("brightness") == [0.0, 0.5, 1.0]
    assert score("lengths") == [1.0, 2.0, 3.0]
    assert score("odd") == [1.0, None, None]
    assert score("full") == [1.0, None, None]
    assert score("few") == [None, None, None]
    assert score("Classy") == [2.0, 2.0, 2.0]


def test_a_function_that_raises_fails_its_images_and_says_why(plugin: types.ModuleType) -> None:
    scores = load_reward("my_rewards:raises").score(IMAGES, PROMPTS, METADATA)
    assert scores.failed == 3
    assert "no such image" in scores.info["error"][0]


def test_a_weighted_sum_fails_where_any_part_failed(plugin: types.ModuleType) -> None:
    scores = combine({"my_rewards:odd": 2.0, "my_rewards:Classy": -0.5}).score(IMAGES, PROMPTS, METADATA)
    assert scores.values == [1.0, None, None]
    assert scores.info["my_rewards:odd"] == [1.0, None, None]
    assert scores.info["my_rewards:Classy.who"] == ["classy"] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("orc", "unknown reward 'orc'"),
        ("my_rewards:number", "neither a function"),
        ("my_rewards:gone", "has no 'gone'"),
    ],
)
def test_a_reward_that_is_none_is_a_config_error(plugin: types.ModuleType, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(name)


def test_no_reward_at_all_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="names no reward"):
        combine({})
