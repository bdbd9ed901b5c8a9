"""The example of a server for packages of another environment, with stand-ins for the packages alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from spotlight.rl.rewards import load_reward

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "reward_server.py"
# As the packages are called; brightness stands in for their judgement.
IMAGE_REWARD = """
class Model:
    def score(self, prompt, image):
        assert image.mode == "RGB"
        return image.getpixel((0, 0))[0] / 0 if prompt == "broken" else image.getpixel((0, 0))[0]

def load(name):
    assert name == "ImageReward-v1.0"
    return Model()
"""
HPSV2 = """
def score(images, prompt, hps_version):
    assert hps_version == "v2.1"
    return [images.getpixel((0, 0))[0]]
"""

IMAGES = torch.stack([torch.full((3, 8, 8), level / 255) for level in range(0, 200, 20)])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "ImageReward.py").write_text(IMAGE_REWARD)
    (tmp_path / "hpsv2.py").write_text(HPSV2)
    # It must not need what only we have.
    (tmp_path / "spotlight.py").write_text("raise ImportError('not here')")

    def start(name: str, token: str = "") -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "SPOTLIGHT_REWARD_TOKEN": token}
        command = [sys.executable, str(EXAMPLE), name, "--port", "0"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        assert started[-1].stdout is not None
        return started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize("name", ["image_reward", "hps"])
def test_scores_come_back_in_order(serve: Callable[..., str], name: str) -> None:
    scores = load_reward(serve(name)).score(IMAGES, ["a"] * 10, [{}] * 10)
    assert scores.values == [float(level) for level in range(0, 200, 20)]


def test_an_image_that_fails_has_no_score_and_a_reason(serve: Callable[..., str]) -> None:
    prompts = ["a"] * 9 + ["broken"]
    scores = load_reward(serve("image_reward")).score(IMAGES, prompts, [{}] * 10)
    assert scores.values == [*(float(level) for level in range(0, 180, 20)), None]
    assert "ZeroDivisionError" in scores.info["error"][9]


def test_the_token_is_asked_for(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    reward = load_reward(serve("image_reward", token="secret"))
    monkeypatch.setenv("SPOTLIGHT_REWARD_TOKEN", "wrong")
    refused = reward.score(IMAGES[:1], ["a"], [{}])
    assert refused.values == [None]
    assert "401" in refused.info["error"][0]
    monkeypatch.setenv("SPOTLIGHT_REWARD_TOKEN", "secret")
    assert reward.score(IMAGES[:1], ["a"], [{}]).values == [0.0]


def test_beyond_this_machine_it_insists_on_a_token() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "SPOTLIGHT_REWARD_TOKEN"}
    command = [sys.executable, str(EXAMPLE), "hps", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)
    assert done.returncode == 2
    assert "SPOTLIGHT_REWARD_TOKEN" in done.stderr
