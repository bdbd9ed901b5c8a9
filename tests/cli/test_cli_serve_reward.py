"""`spotlight serve-reward`: a run's reward may live in another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from spotlight.rl.rewards import load_reward


@pytest.mark.slow
def test_a_served_reward_scores_like_the_one_at_home() -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "spotlight_cli.main", "serve-reward", "jpeg_compressibility", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    images = (images * 255).round() / 255  # what a PNG can hold
    prompts, metadata = ["a", "b", "c"], [{}, {}, {}]
    remote = load_reward(url).score(images, prompts, metadata).values
    assert remote == load_reward("jpeg_compressibility").score(images, prompts, metadata).values
    assert None not in remote
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=20)
    assert server.returncode == 130


def test_an_open_address_without_a_token_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spotlight_cli.main", "serve-reward", "jpeg_compressibility", "--host", "0.0.0.0"],
        capture_output=True, text=True, timeout=50, check=False,
        env={k: v for k, v in os.environ.items() if k != "SPOTLIGHT_REWARD_TOKEN"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "token" in done.stderr
    assert done.stdout == ""
