"""GenEval's detector with a tiny random Mask2Former and CLIP of the real classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import tiny_rewards
from PIL import Image

from spotlight.rl.rewards import detector, load_reward
from spotlight.rl.rewards.clip import picture
from spotlight.rl.rewards.detector import GREY, MAX_OBJECTS, CocoDetector, box_of, cut_out

LABELS = {0: "mouse", 1: "cat", 2: "sports ball"}
IMAGE = torch.rand(3, 40, 56, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    base = tmp_path_factory.mktemp("detector")
    return f"{tiny_rewards.save_detector(base / 'm2f', LABELS)},{tiny_rewards.save_clip(base / 'clip')}"


@pytest.fixture
def sees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "THRESHOLD", 0.0)  # random weights are sure of nothing


def test_objects_are_in_the_picture_the_surest_first(source: str, sees_everything):
    found = CocoDetector(source)(IMAGE, {"include": [{"class": "cat", "count": 1, "color": "red"}]})
    assert found
    assert [d.confidence for d in found] == sorted((d.confidence for d in found), reverse=True)
    for d in found:
        x0, y0, x1, y1 = d.box
        assert 0 <= x0 < x1 <= 56
        assert 0 <= y0 < y1 <= 40
        assert d.label in {"computer mouse", "cat", "sports ball"}  # GenEval's names
        assert d.color in (detector.COLORS if d.label == "cat" else ("",))


def test_it_is_deterministic(source: str, sees_everything):
    metadata = {"include": [{"class": "cat", "count": 1, "color": "red"}]}
    assert CocoDetector(source)(IMAGE, metadata) == CocoDetector(source)(IMAGE, metadata)


def test_counting_prompts_ask_for_more_certainty(source: str, monkeypatch: pytest.MonkeyPatch):
    find = CocoDetector(source)
    asked = []
    monkeypatch.setattr(find, "_objects", lambda shown, threshold: asked.append(threshold) or iter(()))
    for tag in ("counting", "colors"):
        find(IMAGE, {"tag": tag, "include": []})
    assert asked == [0.9, 0.3]


def test_at_most_sixteen_of_a_class(source: str, monkeypatch: pytest.MonkeyPatch):
    find = CocoDetector(source)
    mask = torch.ones(40, 56, dtype=torch.bool)
    crowd = [("cat", 1.0 - i / 100, mask) for i in range(20)] + [("dog", 0.5, mask)]
    monkeypatch.setattr(find, "_objects", lambda shown, threshold: iter(crowd))
    found = find(IMAGE, {})
    assert sum(d.label == "cat" for d in found) == MAX_OBJECTS
    assert min(d.confidence for d in found if d.label == "cat") == pytest.approx(0.85)
    assert sum(d.label == "dog" for d in found) == 1


def test_a_box_goes_around_its_mask():
    mask = torch.zeros(10, 20, dtype=torch.bool)
    mask[2, 5] = mask[6, 9] = True
    assert box_of(mask) == (5, 2, 10, 7)


def test_a_cut_out_is_grey_around_the_object():
    mask = torch.zeros(10, 20, dtype=torch.bool)
    mask[2:4, 5:9] = mask[6, 5] = True
    shown = Image.new("RGB", (20, 10), (200, 10, 20))
    pixels = np.asarray(cut_out(shown, mask))
    assert pixels.shape == (5, 4, 3)
    assert (pixels[:2] == (200, 10, 20)).all()
    assert (pixels[3] == GREY).all()
    assert (pixels[4, 0] == (200, 10, 20)).all()


def test_both_rewards_score_through_the_registry(source: str):
    metadata = [{"include": [{"class": "cat", "count": 1}]}, {"no": "entry"}]
    images = IMAGE.expand(2, -1, -1, -1)
    for name in ("geneval", "geneval_graded"):
        scores = load_reward(f"{name}@{source}").score(images, ["a photo of a cat"] * 2, metadata)
        assert scores.values == [0.0, None]  # nothing found; no GenEval metadata
        assert "no GenEval metadata" in scores.info["error"][1]


def test_a_picture_is_what_the_tensor_says():
    image = torch.zeros(3, 2, 2)
    image[0, 0, 1], image[1, 1, 0] = 1.0, 0.5
    assert np.asarray(picture(image)).tolist() == [[[0, 0, 0], [255, 0, 0]], [[0, 128, 0], [0, 0, 0]]]
