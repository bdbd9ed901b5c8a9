"""GenEval's formula on hand-made detections, and the checker of drawn shapes on drawn scenes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from torch import Tensor

from spotlight.rl.rewards import load_reward
from spotlight.rl.rewards.geneval import RELATIONS, Detection, judge, relations
from spotlight.rl.rewards.shapes import COLORS, SHAPES, detect


def at(
    label: str, x: float, y: float, color: str = "red", confidence: float = 0.9, size: float = 10
) -> Detection:
    return Detection(label, (x - size / 2, y - size / 2, x + size / 2, y + size / 2), color, confidence)


CUP, CUP2, CUP3 = at("cup", 10, 50), at("cup", 50, 50, "blue", 0.8), at("cup", 90, 50, "red", 0.7)
DOG = at("dog", 50, 10, "brown")


@pytest.mark.parametrize(
    ("found", "metadata", "correct", "graded"),
    [
        ([CUP], {"include": [{"class": "cup", "count": 1}]}, True, 1.0),
        ([], {"include": [{"class": "cup", "count": 1}]}, False, 0.0),
        ([CUP], {"include": [{"class": "cup", "count": 2}]}, False, 0.5),
        ([CUP, CUP2, CUP3], {"include": [{"class": "cup", "count": 2}]}, True, 1.0),
        (
            [CUP, CUP2, CUP3],
            {"include": [{"class": "cup", "count": 2}], "exclude": [{"class": "cup", "count": 3}]},
            False,
            (1 + 2 / 3) / 2,
        ),
        ([CUP, CUP2], {"include": [{"class": "cup", "count": 2}, {"class": "dog", "count": 1}]}, False, 0.5),
        ([CUP], {"include": [{"class": "cup", "count": 1, "color": "red"}]}, True, 1.0),
        ([CUP2], {"include": [{"class": "cup", "count": 1, "color": "red"}]}, False, 0.5),
        # Only the `count` most confident are looked at: the third, red one does not help.
        ([CUP3, CUP2, CUP], {"include": [{"class": "cup", "count": 2, "color": "red"}]}, False, 0.75),
        (
            [CUP2, DOG],
            {
                "include": [
                    {"class": "cup", "count": 1},
                    {"class": "dog", "count": 1, "position": ["above", 0]},
                ]
            },
            True,
            1.0,
        ),
        (
            [CUP2, DOG],
            {
                "include": [
                    {"class": "cup", "count": 1},
                    {"class": "dog", "count": 1, "position": ["below", 0]},
                ]
            },
            False,
            2 / 3,
        ),
        (  # the cup has the wrong colour, so it is no target for the dog's position
            [CUP2, DOG],
            {
                "include": [
                    {"class": "cup", "count": 1, "color": "red"},
                    {"class": "dog", "count": 1, "position": ["above", 0]},
                ]
            },
            False,
            (1 + 0 + 1 + 0) / 4,
        ),
        (
            [CUP],
            {"include": [{"class": "cup", "count": 1, "color": None, "position": None}], "exclude": None},
            True,
            1.0,
        ),
        ([CUP], {"exclude": [{"class": "cup", "count": 1}]}, False, 0.0),
    ],
)
def test_judge(found: list[Detection], metadata: dict[str, Any], correct: bool, graded: float) -> None:
    verdict = judge(found, metadata)
    assert verdict.correct is correct
    assert verdict.graded == pytest.approx(graded)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (-50, 0, {"left of"}),
        (50, 0, {"right of"}),
        (0, -50, {"above"}),
        (0, 50, {"below"}),
        (40, 40, {"right of", "below"}),
        (1.5, 1.5, set()),  # within a tenth of both sizes
        (50, 15, {"right of"}),
        (0, 0, set()),
    ],
)
def test_relations(x: float, y: float, expected: set[str]) -> None:
    assert relations(at("a", 100 + x, 100 + y), at("b", 100, 100)) == expected


coordinates = st.floats(0, 100)
detections = st.lists(
    st.builds(at, st.sampled_from(["cup", "dog"]), coordinates, coordinates, st.sampled_from(["red", "blue"]),
              st.floats(0, 1), st.floats(1, 30)),
    max_size=5,
)  # fmt: skip
include = st.lists(
    st.fixed_dictionaries(
        {"class": st.sampled_from(["cup", "dog"]), "count": st.integers(1, 3)},
        optional={"color": st.sampled_from(["red", "blue"])},
    ),
    min_size=1,
    max_size=3,
)


@given(detections, include, st.sampled_from(RELATIONS), st.booleans())
def test_the_graded_score_is_one_exactly_when_geneval_says_correct(
    found: list[Detection], entries: list[dict[str, Any]], relation: str, excluded: bool
) -> None:
    if len(entries) > 1:
        entries[-1]["position"] = [relation, 0]
    metadata = {"include": entries, "exclude": [{"class": "cup", "count": 2}] if excluded else []}
    verdict = judge(found, metadata)
    assert 0 <= verdict.graded <= 1
    assert verdict.correct == (verdict.graded == 1)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"include": []},
        {"include": "cup"},
        {"include": [7]},
        {"include": [{"count": 1}]},
        {"include": [{"class": "cup"}]},
        {"include": [{"class": "cup", "count": 0}]},
        {"include": [{"class": "cup", "count": "2"}]},
        {"include": [{"class": "cup", "count": 10**9}]},
        {"include": [{"class": "cup", "count": 1, "position": "above"}]},
        {"include": [{"class": "cup", "count": 1, "position": ["beside", 0]}]},
        {"include": [{"class": "cup", "count": 1, "position": ["above", 0]}]},
        {"exclude": [{"class": "cup", "count": None}]},
    ],
)
def test_what_is_no_geneval_entry_fails_and_says_why(metadata: dict[str, Any]) -> None:
    scores = load_reward("geneval_shapes").score(torch.rand(1, 3, 32, 32), ["x"], [metadata])
    assert scores.values == [None]
    assert scores.info["error"][0].startswith("no GenEval metadata")


def scene(
    objects: list[tuple[str, str, float, float, float]], size: int, noise: float = 0, seed: int = 0
) -> Tensor:
    """(3, size, size); objects are (shape, colour, x, y, radius) in units of the picture."""
    picture = Image.new("RGB", (size, size), (245, 245, 245))
    canvas = ImageDraw.Draw(picture)
    for shape, color, x, y, radius in objects:
        x, y, r = x * size, y * size, radius * size
        if shape == "circle":
            canvas.ellipse((x - r, y - r, x + r, y + r), fill=COLORS[color])
        elif shape == "square":
            canvas.rectangle((x - 0.9 * r, y - 0.9 * r, x + 0.9 * r, y + 0.9 * r), fill=COLORS[color])
        else:
            canvas.polygon([(x, y - r), (x - r, y + 0.85 * r), (x + r, y + 0.85 * r)], fill=COLORS[color])
    pixels = np.asarray(picture).astype(np.float32)
    pixels += noise * np.random.default_rng(seed).standard_normal(pixels.shape)
    return torch.from_numpy(pixels.clip(0, 255) / 255).permute(2, 0, 1).float()


def random_scene(rng: random.Random) -> list[tuple[str, str, float, float, float]]:
    cells = rng.sample(list(itertools.product((0.27, 0.73), repeat=2)), rng.randint(1, 4))
    colors = [color for color in COLORS if color != "white"]
    return [(rng.choice(SHAPES), rng.choice(colors), x, y, rng.uniform(0.14, 0.18)) for x, y in cells]


@pytest.mark.parametrize(
    ("size", "noise"), [(24, 0), (32, 0), (64, 0), (128, 0), (256, 0), (64, 12), (128, 12)]
)
def test_drawn_scenes_are_found_whole(size: int, noise: float) -> None:
    rng = random.Random(size)
    wrong = 0
    for seed in range(60):
        objects = random_scene(rng)
        found = detect(scene(objects, size, noise, seed))
        wrong += sorted((o.label, o.color) for o in found) != sorted((o[0], o[1]) for o in objects)
    assert wrong <= 1


def test_shapes_that_touch_are_two() -> None:
    touching = scene([("circle", "red", 0.35, 0.5, 0.16), ("square", "blue", 0.6, 0.5, 0.16)], 128)
    assert sorted(o.color for o in detect(touching)) == ["blue", "red"]


def test_blank_grey_and_noise_hold_nothing() -> None:
    grey = torch.full((1, 64, 64), 0.5)
    noise = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert detect(grey) == []
    assert len(detect(noise)) <= 1
    assert detect(torch.ones(3, 64, 64)) == []


@pytest.mark.parametrize("size", [1, 8, 16, 24, 33])
def test_any_picture_can_be_looked_at(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for number in range(40):
        picture = torch.rand(3, size, size, generator=generator)
        detect((picture > 0.5).float() if number % 2 else picture)


def test_a_prompt_file_s_entry_is_scored() -> None:
    right = scene([("circle", "red", 0.25, 0.5, 0.15), ("square", "blue", 0.75, 0.5, 0.15)], 64)
    wrong = scene([("circle", "red", 0.75, 0.5, 0.15), ("square", "blue", 0.25, 0.5, 0.15)], 64)
    broken = torch.full_like(right, torch.nan)
    row = {
        "tag": "position",
        "include": [
            {"class": "square", "count": 1, "color": "blue"},
            {"class": "circle", "count": 1, "color": "red", "position": ["left of", 0]},
        ],
    }
    images = torch.stack([right, wrong, broken])
    strict = load_reward("geneval_shapes").score(images, ["x"] * 3, [row] * 3)
    assert strict.values == [1.0, 0.0, None]
    assert sorted(strict.info["found"][0]) == ["blue square", "red circle"]
    assert load_reward("geneval_shapes_graded").score(images, ["x"] * 3, [row] * 3).values == [1.0, 0.8, None]
