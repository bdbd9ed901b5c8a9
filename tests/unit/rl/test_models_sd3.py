"""What SD3's transformer and VAE are tried on for all: sizes, compilation, checkpointing, autocast, tiling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fakes import adapter_contract as contract
from fakes import tiny_pipelines

from spotlight.errors import ConfigError
from spotlight.rl import batching, hub

KIND = "sd3"


@pytest.fixture
def folder(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of(KIND)


def test_a_size_beyond_the_position_table_is_refused(folder: Path):
    with pytest.raises(ConfigError, match="cannot draw") as caught:
        contract.load(folder).latent_shape(400, 64)
    assert "at most 384" in str(caught.value.hint)


def test_compilation_reaches_every_block(folder: Path):
    transformer = contract.load(folder, compile=True).transformer
    assert all(block._compiled_call_impl is not None for block in transformer.transformer_blocks)
    plain = contract.load(folder).transformer
    assert all(block._compiled_call_impl is None for block in plain.transformer_blocks)


def test_without_the_dual_attention_of_medium_it_is_large(tmp_path: Path):
    large = {"dual_attention_layers": (), "num_layers": 1}
    contract.check_images(
        contract.save(KIND, tmp_path, **large), tiny_pipelines.build(KIND, **large), (32, 32), 3.0
    )


@pytest.mark.parametrize("left_out", ["in the checkpoint", "by the run"])
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_without_t5_images_are_the_pipelines(folder: Path, tmp_path: Path, left_out: str, cfg: float):
    """Zeros stand for T5's tokens; they have no part in the run's other embeddings."""
    pipe = tiny_pipelines.build(KIND)
    with_t5, sampler, latents = contract.draw(contract.load(folder), (48, 80), cfg, contract.PROMPTS, [0, 1])
    pipe.text_encoder_3 = pipe.tokenizer_3 = None
    kept = {"embedding_cache": str(tmp_path / "embeddings")}
    if left_out == "by the run":
        contract.load(folder, **kept).encode(contract.PROMPTS)
        adapter = contract.load(folder, t5=False, **kept)
    else:
        pipe.register_modules(text_encoder_3=None, tokenizer_3=None)
        pipe.save_pretrained(str(tmp_path / KIND), safe_serialization=True)
        assert not (tmp_path / KIND / "text_encoder_3").exists()
        adapter = contract.load(tmp_path / KIND, **kept)
    ours, _, _ = contract.draw(adapter, (48, 80), cfg, contract.PROMPTS, [0, 1])
    theirs = contract.draw_with_diffusers(pipe, KIND, (48, 80), sampler, latents)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert (ours - with_t5).abs().max() > 1e-3


def test_a_model_for_many_gpus_stays_on_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Only the transformer: text encoders and VAE work where this process does."""
    monkeypatch.setattr(hub, "device", lambda: torch.device("meta"))
    with hub.on_cpu():
        adapter = contract.load(folder)
    assert batching.device_of(adapter).type == "cpu"
    assert adapter._vae.device.type == "meta"
    with hub.on_cpu(False):
        assert batching.device_of(contract.load(folder)).type == "meta"
    assert batching.device_of(contract.load(folder)).type == "meta"


def test_gradient_checkpointing_changes_no_gradient(folder: Path):
    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        adapter = contract.load(folder, gradient_checkpointing=checkpointing)
        adapter.transformer.requires_grad_(True)
        cond = adapter.encode(contract.PROMPTS)
        latents = torch.ones(2, *adapter.latent_shape(*contract.SMALL))
        adapter.velocity(latents, torch.tensor([0.3, 0.8]), cond).square().mean().backward()
        return [p.grad for p in adapter.transformer.parameters() if p.grad is not None]

    pairs = zip(gradients(False), gradients(True), strict=True)
    assert all(torch.allclose(plain, again, atol=1e-7) for plain, again in pairs)


def test_autocast_multiplies_in_half_precision_and_trains_fp32_weights(folder: Path):
    plain, mixed = contract.load(folder), contract.load(folder, autocast=True)
    latents = torch.ones(2, *plain.latent_shape(*contract.SMALL))
    t, cond = torch.tensor([0.3, 0.8]), plain.encode(contract.PROMPTS)
    mixed.transformer.requires_grad_(True)
    first, second = plain.velocity(latents, t, cond), mixed.velocity(latents, t, cond)
    second.square().mean().backward()
    assert second.dtype == torch.float32
    assert 0 < (first - second).norm() < 0.05 * first.norm()
    assert {p.grad.dtype for p in mixed.transformer.parameters() if p.grad is not None} == {torch.float32}


def test_vae_tiling_is_nearly_the_same_image(folder: Path):
    latents = torch.randn(1, 4, 12, 12, generator=torch.Generator().manual_seed(0))
    plain, tiled = (contract.load(folder, vae_tiling=tiling) for tiling in (False, True))
    tiled._vae.tile_latent_min_size, tiled._vae.tile_sample_min_size = 8, 64
    first, second = plain.decode(latents), tiled.decode(latents)
    assert first.shape == second.shape == (1, 3, 96, 96)
    assert not torch.equal(first, second)
    assert (first - second).abs().mean() < 0.1
