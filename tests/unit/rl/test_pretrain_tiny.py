"""The script that made the shipped checkpoint: what it shows the model, and that it repeats itself."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spotlight.rl import data
from spotlight.rl.rewards import load_reward

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "pretrain_tiny.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("pretrain_tiny", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pretrain_tiny", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PICTURES", 300)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


def test_no_held_out_string_is_ever_drawn(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "draw", lambda text, rng: torch.zeros(16, 32).numpy())
    monkeypatch.setattr(script, "PICTURES", 20_000)
    texts, _ = script.corpus(seed=1)
    held_out = {prompt.text for prompt in data.load("builtin:digits-held-out")}
    assert not held_out & set(texts)
    assert {len(text) for text in texts} == {1, 2, 3}
    assert len({text for text in texts if len(text) == 3}) == 800  # all the others are


def test_the_drawings_are_legible(script: ModuleType) -> None:
    texts = [f"{number:03d}" for number in range(0, 1000, 21)]
    rng = random.Random(0)
    pictures = torch.stack([torch.from_numpy(script.draw(text, rng).copy()) for text in texts])[:, None] / 255
    values = load_reward("ocr").score(pictures, texts, [{}] * len(texts)).values
    assert sum(values) / len(values) > 0.9


def test_the_same_seed_trains_to_the_same_bits_and_another_does_not(script: ModuleType) -> None:
    def losses(seed: int) -> list[float]:
        run = script.Pretraining(seed)
        return [run.step() for _ in range(3)]

    first = losses(1)
    assert losses(1) == first
    assert losses(2) != first


def test_it_stops_on_accuracy(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.2, 0.5, 0.6, 0.9])
    monkeypatch.setattr(script, "held_out_score", lambda models: (next(scores), []))
    monkeypatch.setattr(script, "EVAL_EVERY", 1)
    run = script.Pretraining(1)
    looks = list(script.pretrain(run, target=0.6, max_steps=10))
    assert [look.step for look in looks] == [1, 2, 3]
    assert looks[-1].edit_score == 0.6
