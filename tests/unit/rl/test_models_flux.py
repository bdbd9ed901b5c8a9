"""What only FLUX has: a guidance input, and a distillation without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fakes import adapter_contract as contract
from fakes import tiny_pipelines

KIND = "flux"


@pytest.fixture
def folder(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of(KIND)


def test_the_guidance_input_is_the_configured_one(folder: Path):
    latents = torch.ones(4, *contract.load(folder).latent_shape(*contract.SMALL))
    t = torch.full((4,), 0.5)
    with torch.no_grad():
        low, high = (
            adapter.velocity(latents, t, adapter.encode(["a"] * 4))
            for adapter in (contract.load(folder, guidance=1.0), contract.load(folder, guidance=8.0))
        )
    assert (low - high).abs().max() > 1e-3


def test_schnell_takes_no_guidance(tmp_path: Path):
    schnell = {"guidance_embeds": False}
    contract.check_images(
        contract.save(KIND, tmp_path, **schnell), tiny_pipelines.build(KIND, **schnell), (32, 48), 1.0
    )
