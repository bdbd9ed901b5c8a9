from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from fakes.random_sd3 import RandomSD3
from fakes.rl_runs import export_of
from safetensors.torch import load_file, save_file

from spotlight.config import TrainConfig
from spotlight.errors import IntegrityError
from spotlight.rl import batching, lora, params
from spotlight.rl.export import LORA_FILE, load_export

SHAPE = (1, 16, 32)
FULL = TrainConfig(mode="full")
LORA = TrainConfig(mode="lora", lora_rank=4, lora_alpha=12)


def trained(config: TrainConfig, size: float = 0.02) -> tuple[RandomSD3, params.Weights]:
    """An adapter and weights that differ from the ones it holds."""
    adapter = RandomSD3()
    params.prepare(adapter, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: tensor + size * torch.randn(tensor.shape, generator=generator)
        for name, tensor in params.snapshot(adapter.transformer).items()
    }
    return adapter, moved


def outputs(transformer: SD3Transformer2DModel) -> torch.Tensor:
    adapter = RandomSD3()
    adapter.transformer = transformer.eval()
    latents = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return batching.velocity(adapter, latents, torch.full((5,), 0.6), batching.encode(adapter, ["7"] * 5))


def expected(adapter: RandomSD3, weights: params.Weights) -> torch.Tensor:
    with params.bound(adapter.transformer, weights):
        return outputs(adapter.transformer)


def test_a_lora_export_works_in_the_real_pipeline(tmp_path: Path):
    adapter, weights = trained(LORA)
    path = export_of(adapter, weights, LORA, tmp_path / "export", shape=SHAPE, fresh=RandomSD3)
    assert path == tmp_path / "export" / LORA_FILE
    pipeline = StableDiffusion3Pipeline(
        transformer=RandomSD3().transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.load_lora_weights(str(path.parent), weight_name=LORA_FILE)  # offline it does not look
    loaded = outputs(pipeline.transformer)
    assert torch.allclose(loaded, expected(adapter, weights), atol=1e-5)
    assert (loaded - outputs(RandomSD3().transformer)).abs().max() > 1e-2


def test_lora_keys_are_those_of_diffusers(tmp_path: Path):
    adapter, weights = trained(LORA)
    tensors = load_file(export_of(adapter, weights, LORA, tmp_path / "e", shape=SHAPE, fresh=RandomSD3))
    assert len(tensors) == len(weights)
    assert all(name.startswith("transformer.transformer_blocks.") for name in tensors)
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in tensors)
    assert {t.dtype for t in tensors.values()} == {torch.float32}


def test_a_full_export_is_a_diffusers_folder(tmp_path: Path):
    adapter, weights = trained(FULL)
    before = params.snapshot(adapter.transformer)
    path = export_of(adapter, weights, FULL, tmp_path / "export", shape=SHAPE, fresh=RandomSD3)
    loaded = SD3Transformer2DModel.from_pretrained(path)
    assert torch.equal(outputs(loaded), expected(adapter, weights))
    after = params.snapshot(adapter.transformer)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_lora_is_a_diffusers_folder(dtype, tmp_path: Path):
    """In fp32 equal to rounding; in bf16 each weight is the nearest to what the adapter makes of it."""

    def fresh() -> RandomSD3:
        adapter = RandomSD3()
        adapter.transformer.to(dtype)
        return adapter

    adapter, weights = trained(LORA, 0.1)
    base = {name: tensor.clone() for name, tensor in fresh().transformer.state_dict().items()}
    if dtype != torch.float32:
        adapter = fresh()
        params.prepare(adapter, LORA, seed=0)
    path = export_of(adapter, weights, LORA, tmp_path / "merged", shape=SHAPE, fresh=fresh, merged=True)
    assert path == tmp_path / "merged" / "transformer"
    loaded = SD3Transformer2DModel.from_pretrained(path, torch_dtype=dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(outputs(loaded), expected(adapter, weights), atol=1e-5, rtol=0)
    changed = 0
    for name, tensor in loaded.state_dict().items():
        layer = name.removesuffix(".weight")
        up, down = (weights.get(f"{layer}.lora_{side}.default.weight") for side in "BA")
        wanted = base[name] if up is None else (base[name].float() + 3.0 * (up @ down)).to(dtype)
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor, wanted, atol=1e-7 if dtype == torch.float32 else 0, rtol=0)
        changed += up is not None and not torch.equal(tensor, base[name])
    assert 2 * changed == len(weights)


def test_an_adapter_of_another_architecture_is_not_merged():
    _, weights = trained(LORA)
    name = next(name for name in weights if "lora_B" in name)
    transformer = RandomSD3().transformer
    before = {key: tensor.clone() for key, tensor in transformer.state_dict().items()}
    for broken in (
        {name.replace("blocks.0", "blocks.9"): weights[name]},
        {name: weights[name][1:]},
        {other: tensor for other, tensor in weights.items() if other != name},
    ):
        kept = {} if len(broken) > 1 else weights
        with pytest.raises(IntegrityError, match=r"belongs to no layer|are not .* pairs"):
            lora.merge(transformer, kept | broken, 4, 12)
    assert all(torch.equal(before[key], tensor) for key, tensor in transformer.state_dict().items())


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_untrained_weights_export_too(config, tmp_path: Path):
    adapter = RandomSD3()
    params.prepare(adapter, config, seed=0)
    export_of(
        adapter, params.snapshot(adapter.transformer), config, tmp_path / "e", shape=SHAPE, fresh=RandomSD3
    )


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_an_export_replaces_the_one_before(config, tmp_path: Path):
    for seed in range(2):
        adapter, weights = trained(config, 0.01 * (seed + 1))
        export_of(adapter, weights, config, tmp_path / "export", shape=SHAPE, fresh=RandomSD3)
    fresh = RandomSD3()
    load_export(fresh, tmp_path / "export")
    assert torch.allclose(outputs(fresh.transformer), expected(adapter, weights), atol=1e-5)
    assert [p.name for p in tmp_path.iterdir() if "export" in p.name] == ["export"]


def rewritten(change):
    """diffusers' loader on a file whose (name, tensor) pairs went through `change`."""

    def load(adapter: RandomSD3, folder: Path) -> None:
        tensors = load_file(folder / LORA_FILE)
        save_file(dict(change(name, tensor) for name, tensor in tensors.items()), folder / LORA_FILE)
        load_export(adapter, folder)

    return load


@pytest.mark.parametrize(
    "change",
    [
        lambda name, tensor: (name.removeprefix("transformer."), tensor),
        lambda name, tensor: (name.replace("transformer_blocks", "blocks"), tensor),
        lambda name, tensor: (name, tensor / 2 if "lora_B" in name else tensor),
        lambda name, tensor: (name, tensor * (0 if "blocks.1" in name and "lora_B" in name else 1)),
    ],
    ids=["no prefix", "renamed", "half strength", "one layer missing"],
)
@pytest.mark.parametrize("size", [0.02, 0.001])
def test_a_lora_that_does_not_take_is_caught(change, size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    adapter, weights = trained(LORA, size)
    good = tmp_path / "export"
    export_of(adapter, weights, LORA, good, shape=SHAPE, fresh=RandomSD3)
    kept = (good / LORA_FILE).read_bytes()
    monkeypatch.setattr("spotlight.rl.export.load_export", rewritten(change))
    with pytest.raises(IntegrityError, match=r"trained outputs|cannot be loaded"):
        export_of(adapter, weights, LORA, good, shape=SHAPE, fresh=RandomSD3)
    assert (good / LORA_FILE).read_bytes() == kept


def test_another_base_is_caught(tmp_path: Path):
    adapter, weights = trained(LORA)
    with pytest.raises(IntegrityError, match="does not give the trained outputs"):
        export_of(adapter, weights, LORA, tmp_path / "e", shape=SHAPE, fresh=lambda: RandomSD3(seed=1))
    assert not (tmp_path / "e").exists()
