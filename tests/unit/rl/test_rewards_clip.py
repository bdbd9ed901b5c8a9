"""CLIP and PickScore with a tiny random CLIP of the real class, loaded from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import tiny_rewards
from transformers import CLIPModel, CLIPProcessor

from spotlight.errors import ConfigError, IntegrityError, NotFoundError
from spotlight.rl.rewards import combine, load_reward
from spotlight.rl.rewards.clip import picture

PROMPTS = ["a cat", "A DOG, no: two dogs, and a text that is much longer than the model takes", "", "猫 🐱"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_rewards.save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(4, 3, 40, 56, generator=torch.Generator().manual_seed(0))


def test_clip_is_the_models_own_cosine(folder: Path, images: torch.Tensor):
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    inputs = processor(
        text=PROMPTS,
        images=[picture(image) for image in images],
        return_tensors="pt",
        padding=True,
        truncation=True,
    )
    with torch.no_grad():
        expected = model(**inputs).logits_per_image.diag()
    values = load_reward(f"clip@{folder}").score(images, PROMPTS, [{}] * 4).values
    assert values == pytest.approx((expected / model.logit_scale.exp()).tolist(), abs=1e-5)
    picks = load_reward(f"pickscore@{folder}").score(images, PROMPTS, [{}] * 4).values
    assert picks == pytest.approx(expected.tolist(), abs=1e-4)


def test_scores_do_not_depend_on_the_batch(folder: Path, images: torch.Tensor):
    reward = load_reward(f"clip@{folder}")
    together = reward.score(images, PROMPTS, [{}] * 4).values
    alone = [reward.score(images[i : i + 1], PROMPTS[i : i + 1], [{}]).values[0] for i in range(4)]
    assert alone == pytest.approx(together, abs=1e-5)


def test_image_and_prompt_both_matter(folder: Path, images: torch.Tensor):
    values = load_reward(f"clip@{folder}").score(images[[0, 0, 1]], ["a", "zzz", "a"], [{}] * 3).values
    assert len({round(value, 4) for value in values}) == 3


def test_grey_and_broken_images(folder: Path, images: torch.Tensor):
    reward = load_reward(f"clip@{folder}")
    grey = images.mean(dim=1, keepdim=True)
    assert reward.score(grey, PROMPTS, [{}] * 4).values == pytest.approx(
        reward.score(grey.expand(-1, 3, -1, -1), PROMPTS, [{}] * 4).values, abs=1e-6
    )
    broken = images.clone()
    broken[1, 0, 0, 0] = float("nan")
    values = reward.score(broken, PROMPTS, [{}] * 4).values
    assert [value is None for value in values] == [False, True, False, False]


def test_weighted_beside_another_reward(folder: Path, images: torch.Tensor):
    clip, jpeg = f"clip@{folder}", "jpeg_compressibility"
    scores = combine({clip: 2.0, jpeg: 0.5}).score(images, PROMPTS, [{}] * 4)
    parts = zip(scores.info[clip], scores.info[jpeg], strict=True)
    assert scores.values == pytest.approx([2 * a + 0.5 * b for a, b in parts])


def test_weights_that_are_not_there(tmp_path: Path, folder: Path):
    with pytest.raises(NotFoundError, match="with safetensors"):
        load_reward(f"clip@{tmp_path}")
    with pytest.raises(NotFoundError, match="not in the local cache"):
        load_reward("pickscore@nobody/nothing@0123abc")
    with pytest.raises(NotFoundError, match="nor is it a hub id"):
        load_reward("clip@no such folder")
    with pytest.raises(ConfigError, match="unknown reward"):
        load_reward(f"klip@{folder}")
    with pytest.raises(ConfigError, match="unknown reward"):
        load_reward(f"ocr@{folder}")


def test_a_truncated_file_is_damage(tmp_path: Path):
    folder = tiny_rewards.save_clip(tmp_path / "clip")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="not a CLIPModel"):
        load_reward(f"clip@{folder}")
