"""The script that made the shipped checkpoints: what it shows the models, and that it repeats itself."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spotlight.rl import data
from spotlight.rl.rewards import load_reward

SCRIPTS = Path(__file__).parents[3] / "benchmarks"
BASES = ("tiny", "tiny-shapes")


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("tiny_pictures")
    monkeypatch.setattr(module, "PICTURES", 300)
    return module


@pytest.fixture
def script(pictures: ModuleType) -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("pretrain_tiny")
    torch.set_num_threads(threads)


def test_no_held_out_string_is_ever_drawn(pictures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "draw_digits", lambda text, rng: torch.zeros(16, 32).numpy())
    monkeypatch.setattr(pictures, "PICTURES", 20_000)
    texts, _ = pictures.digits(seed=1)
    held_out = {prompt.text for prompt in data.load("builtin:digits-held-out")}
    assert not held_out & set(texts)
    assert {len(text) for text in texts} == {1, 2, 3}
    assert len({text for text in texts if len(text) == 3}) == 800  # all the others are


def test_no_held_out_scene_is_ever_drawn(pictures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "draw_scene", lambda metadata, rng: torch.zeros(24, 24, 3).numpy())
    monkeypatch.setattr(pictures, "PICTURES", 10_000)
    texts, _ = pictures.scenes(seed=1)
    assert not {prompt.text for prompt in data.load("builtin:shapes-held-out")} & set(texts)
    assert {prompt.text for prompt in data.load("builtin:shapes-train")} <= set(texts)


def test_the_drawn_digits_are_legible(pictures: ModuleType) -> None:
    texts = [f"{number:03d}" for number in range(0, 1000, 21)]
    rng = random.Random(0)
    drawn = torch.stack([torch.from_numpy(pictures.draw_digits(text, rng).copy()) for text in texts])
    values = load_reward("ocr").score(drawn[:, None] / 255, texts, [{}] * len(texts)).values
    assert sum(values) / len(values) > 0.9


def test_the_drawn_scenes_are_what_their_prompts_say(pictures: ModuleType) -> None:
    """Every prompt, held out or not, judged by GenEval's rule; the picture of another prompt seldom passes."""
    rows = data.load("builtin:shapes-held-out") + data.load("builtin:shapes-train")
    rng = random.Random(0)
    drawn = torch.stack([torch.from_numpy(pictures.draw_scene(row.metadata, rng).copy()) for row in rows])
    images, texts = drawn.permute(0, 3, 1, 2) / 255, [row.text for row in rows]
    reward = load_reward("geneval_shapes")
    right = reward.score(images, texts, [row.metadata for row in rows]).values
    other = reward.score(images, texts, [row.metadata for row in rows[1:] + rows[:1]]).values
    assert sum(right) / len(right) >= 0.98
    assert sum(other) / len(other) < 0.1


@pytest.mark.parametrize("base", BASES)
def test_the_same_seed_trains_to_the_same_bits_and_another_does_not(script: ModuleType, base: str) -> None:
    def losses(seed: int) -> list[float]:
        run = script.Pretraining(script.BASES[base], seed)
        return [run.step() for _ in range(3)]

    first = losses(1)
    assert losses(1) == first
    assert losses(2) != first


@pytest.mark.parametrize("base", BASES)
def test_an_untrained_model_scores_next_to_nothing(script: ModuleType, base: str) -> None:
    assert script.Pretraining(script.BASES[base], 1).held_out_score() < 0.1


def test_it_stops_on_accuracy(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.2, 0.5, 0.6, 0.9])
    monkeypatch.setattr(script.Pretraining, "held_out_score", lambda run: next(scores))
    monkeypatch.setattr(script, "EVAL_EVERY", 1)
    run = script.Pretraining(script.BASES["tiny"], 1)
    looks = list(script.pretrain(run, target=0.6, max_steps=10))
    assert [look.step for look in looks] == [1, 2, 3]
    assert looks[-1].score == 0.6
