"""JPEG size as a reward."""

from __future__ import annotations

import torch

from spotlight.rl.rewards import load_reward

NOISE = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_detail_costs_bytes() -> None:
    images = torch.stack([NOISE, NOISE.mean() + 0 * NOISE, torch.full((3, 64, 64), torch.nan)])
    detailed, plain, broken = load_reward("jpeg_incompressibility").score(images, [""] * 3, [{}] * 3).values
    assert detailed > 5 > 1 > plain > 0.5  # kilobytes
    assert broken is None


def test_compressibility_is_the_opposite_and_grey_is_an_image() -> None:
    grey = NOISE[None, :1]
    (more,) = load_reward("jpeg_incompressibility").score(grey, [""], [{}]).values
    (less,) = load_reward("jpeg_compressibility").score(grey, [""], [{}]).values
    assert more == -less > 0
