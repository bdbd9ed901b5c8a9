from __future__ import annotations

import contextlib

import pytest
import torch
from fakes.random_sd3 import RandomSD3

from spotlight.config import TrainConfig
from spotlight.errors import ConfigError, IntegrityError
from spotlight.rl import batching, params
from spotlight.rl.ema import follow

MODES = pytest.mark.parametrize("mode", ["full", "lora"])


def prepared(mode: str, seed: int = 0) -> RandomSD3:
    adapter = RandomSD3()
    params.prepare(adapter, TrainConfig(mode=mode, lora_rank=4, lora_alpha=8), seed=seed)
    return adapter


def probe(adapter: RandomSD3) -> torch.Tensor:
    latents = torch.randn(4, 1, 16, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return batching.velocity(adapter, latents, torch.full((4,), 0.5), batching.encode(adapter, ["1"] * 4))


def changed(adapter: RandomSD3) -> dict[str, torch.Tensor]:
    return {name: tensor + 0.01 for name, tensor in params.snapshot(adapter.transformer).items()}


def test_lora_starts_equal_to_the_base_and_trains_little():
    adapter = RandomSD3()
    total = sum(p.numel() for p in adapter.transformer.parameters())
    count = params.prepare(adapter, TrainConfig(mode="lora", lora_rank=4), seed=1)
    assert 0 < count < total / 5
    assert torch.equal(probe(adapter), probe(RandomSD3()))
    assert not adapter.transformer.training
    assert all(".lora_" in name for name in params.trainable_parameters(adapter.transformer))


def test_lora_is_drawn_from_the_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = (params.snapshot(prepared("lora", seed).transformer) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_lora_of_a_half_precision_base_is_fp32():
    adapter = RandomSD3(dtype=torch.bfloat16)
    params.prepare(adapter, TrainConfig(mode="lora"), seed=0)
    assert {p.dtype for p in params.trainable_parameters(adapter.transformer).values()} == {torch.float32}
    assert probe(adapter).isfinite().all()


def test_lora_without_a_matching_layer_is_a_config_error():
    adapter = RandomSD3()
    adapter.lora_targets = ("no_such_layer",)
    with pytest.raises(ConfigError, match="no_such_layer"):
        params.prepare(adapter, TrainConfig(mode="lora"), seed=0)


def test_full_fine_tuning_of_half_precision_weights_is_refused():
    with pytest.raises(ConfigError, match="needs fp32 weights") as caught:
        params.prepare(RandomSD3(dtype=torch.bfloat16), TrainConfig(mode="full"))
    assert "lora" in caught.value.hint


@MODES
def test_bind_carries_the_outputs_over_and_counts(mode):
    trainer, worker = prepared(mode, 1), prepared(mode, 2)
    params.bind(trainer.transformer, changed(trainer))
    weights = params.snapshot(trainer.transformer)
    assert params.bind(worker.transformer, weights) == len(weights) > 0
    assert torch.equal(probe(worker), probe(trainer))
    assert not torch.equal(probe(worker), probe(RandomSD3()))


@MODES
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda w, name: w.pop(name), "is missing"),
        (lambda w, name: w.update({name.replace("transformer_blocks", "blocks"): w.pop(name)}), "2 of"),
        (lambda w, name: w.update(extra=torch.zeros(1)), "extra is unknown"),
        (lambda w, name: w.update({name: w[name][:1]}), "not ("),
        (lambda w, name: w.clear(), "is missing"),
    ],
    ids=["missing", "renamed", "extra", "shape", "empty"],
)
def test_bind_refuses_weights_that_do_not_fit_and_changes_nothing(mode, spoil, said):
    adapter = prepared(mode)
    before = params.snapshot(adapter.transformer)
    weights = changed(adapter)
    spoil(weights, next(name for name in weights if "transformer_blocks" in name))
    with pytest.raises(IntegrityError) as caught:
        params.bind(adapter.transformer, weights)
    assert said in caught.value.message
    after = params.snapshot(adapter.transformer)
    assert all(torch.equal(before[name], after[name]) for name in before)


@MODES
def test_bound_gives_the_live_weights_back_bit_for_bit_even_after_an_error(mode):
    adapter = prepared(mode)
    live, output = params.snapshot(adapter.transformer), probe(adapter)
    with contextlib.suppress(RuntimeError), params.bound(adapter.transformer, changed(adapter)):
        assert not torch.equal(probe(adapter), output)
        raise RuntimeError
    after = params.snapshot(adapter.transformer)
    assert all(torch.equal(live[name], after[name]) for name in live)


def test_the_average_follows():
    average = {"a": torch.tensor([0.0, 1.0])}
    for _ in range(3):
        follow(average, {"a": torch.tensor([1.0, 1.0], dtype=torch.bfloat16)}, 0.5)
    assert average["a"].tolist() == [0.875, 1.0]
    assert average["a"].dtype == torch.float32
    weights = {"a": torch.tensor([0.1, 0.3])}
    follow(average, weights, 0.0)
    assert torch.equal(average["a"], weights["a"])
