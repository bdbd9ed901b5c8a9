"""OCR by a vision-language model: a tiny random DeepSeek-OCR-2 of the real class, and scripted readings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import tiny_rewards

from spotlight.rl.rewards import load_reward
from spotlight.rl.rewards.vlm_ocr import ASK, MAX_NEW_TOKENS, PLAIN, VlmOcr

IMAGES = torch.rand(3, 3, 32, 64, generator=torch.Generator().manual_seed(0))
PROMPTS = ['a sign that says "hi"', "a cat", 'a sign "Où est-ce?"']


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> VlmOcr:
    folder: Path = tiny_rewards.save_reader(tmp_path_factory.mktemp("reader"))
    found = load_reward(f"vlm_ocr@{folder}")
    assert isinstance(found, VlmOcr)
    return found


def test_the_real_class_reads(reward: VlmOcr):
    first = reward.score(IMAGES[:2], PROMPTS[:2], [{}] * 2)
    again = reward.score(IMAGES[:1], PROMPTS[:1], [{}])
    assert first.values == [0.0, None]  # babble; nothing to read
    assert 0 < len(first.info["reading"][0]) <= 4 * MAX_NEW_TOKENS
    assert PLAIN not in first.info["reading"][0]
    assert again.info["reading"] == first.info["reading"][:1]  # greedy, and no matter who shares the batch


def test_scores_are_edit_distances_over_the_whole_reading(reward: VlmOcr, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reward, "read", lambda images: ["H I", "hi", "ou est-ce?"][: len(images)])
    scores = reward.score(IMAGES, PROMPTS, [{}] * 3)
    assert scores.values == [1.0, None, pytest.approx(1 - 1 / 9)]
    monkeypatch.setattr(reward, "read", lambda images: ["hi there and hi and hi"])
    assert reward.score(IMAGES[:1], PROMPTS[:1], [{}]).values == [0.0]


def test_a_broken_image_has_no_score(reward: VlmOcr, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reward, "read", lambda images: ["hi"] * len(images))
    broken = IMAGES.clone()
    broken[0, 0, 0, 0] = float("inf")
    assert reward.score(broken, ['"hi"'] * 3, [{}] * 3).values == [None, 1.0, 1.0]


def test_the_metadata_target_comes_first(reward: VlmOcr, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reward, "read", lambda images: ["42"])
    assert reward.score(IMAGES[:1], ['"hi"'], [{"target": 42}]).values == [1.0]


def test_a_reader_with_a_chat_template_is_asked_in_a_chat(reward: VlmOcr, monkeypatch: pytest.MonkeyPatch):
    seen = []
    processor = reward._processor
    monkeypatch.setattr(processor, "chat_template", "any")
    monkeypatch.setattr(
        processor, "apply_chat_template", lambda chats, **options: seen.append((chats, options))
    )
    reward._inputs(["first picture", "second"])
    [(chats, options)] = seen
    assert [chat[0]["content"][0]["image"] for chat in chats] == ["first picture", "second"]
    assert {chat[0]["content"][1]["text"] for chat in chats} == {ASK}
    assert options["add_generation_prompt"]
    assert options["processor_kwargs"] == {"padding": True}
