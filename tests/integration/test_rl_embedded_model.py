"""The RL core on the embedded checkpoints: their own adapter, prompts and rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes.rl_runs import export_of

from spotlight.config import RunConfig, load
from spotlight.rl import batching, data, params
from spotlight.rl.batch import TrainSample
from spotlight.rl.denoise import DenoiseState, begin, denoise
from spotlight.rl.export import load_export
from spotlight.rl.models import ModelAdapter, load_model
from spotlight.rl.rewards import combine
from spotlight.rl.sampler import Sampler
from spotlight.rl.train_step import Trainer

GROUPS, SIZE = 3, 5


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def roll_out(
    adapter: ModelAdapter, sampler: Sampler, config: RunConfig, *, chunk: int, keep: bool
) -> list[tuple[DenoiseState, data.Prompt]]:
    prompts = [p for p in data.load(config.data.train)[:GROUPS] for _ in range(SIZE)]
    shape = adapter.latent_shape(config.model.height, config.model.width)
    done: list[DenoiseState] = []
    for at in range(0, len(prompts), chunk):
        part = prompts[at : at + chunk]
        states = [
            begin(p.row, at + j, version=0, sampler=sampler, run_seed=0, shape=shape)
            for j, p in enumerate(part)
        ]
        cond = batching.encode(adapter, [p.text for p in part])
        done += denoise(adapter, sampler, cond, states, run_seed=0, keep_trajectory=keep)
    return list(zip(done, prompts, strict=True))


def scored(config: RunConfig, adapter: ModelAdapter, samples: list[tuple[DenoiseState, data.Prompt]]) -> list:
    images = batching.decode(adapter, torch.stack([state.latents for state, _ in samples]))
    reward = combine(config.reward.train)
    scores = reward.score(images, [p.text for _, p in samples], [p.metadata for _, p in samples])
    return [
        TrainSample.of(state, prompt.text, value)
        for (state, prompt), value in zip(samples, scores.values, strict=True)
    ]


@pytest.mark.parametrize("recipe", ["tiny", "tiny-geneval"])
@pytest.mark.parametrize("kind", ["flow_grpo", "nft"])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_roll_out_reward_train_export(kind: str, mode: str, recipe: str, tmp_path: Path):
    sets = (f"algorithm.kind={kind}", "sampler.kind=sde", f"train.mode={mode}", "train.lora_rank=4")
    config = load(recipe, sets)
    trainer = Trainer(load_model(config.model), config)
    worker = load_model(config.model)
    params.prepare(worker, config.train, seed=1)
    assert params.bind(worker.transformer, trainer.trainable()) == len(trainer.parameters)
    keep = trainer.algorithm.needs_trajectory
    samples = roll_out(worker, trainer.sampler, config, chunk=2, keep=keep)
    repacked = roll_out(worker, trainer.sampler, config, chunk=7, keep=keep)
    assert all(torch.equal(a.latents, b.latents) for (a, _), (b, _) in zip(samples, repacked, strict=True))
    metrics = trainer.train(scored(config, worker, samples), 0)
    assert metrics["ratio_dev"] == 0
    assert metrics["updates"] == config.train.updates
    shape = trainer.adapter.latent_shape(config.model.height, config.model.width)
    export_of(
        trainer.adapter,
        trainer.ema_tensors(),
        config.train,
        tmp_path / "export",
        shape=shape,
        fresh=lambda: load_model(config.model),
        prompt=samples[0][1].text,
    )
    fresh = load_model(config.model)
    load_export(fresh, tmp_path / "export")
    after = roll_out(fresh, trainer.sampler, config, chunk=16, keep=False)
    with params.bound(worker.transformer, trainer.ema_tensors()):
        again = roll_out(worker, trainer.sampler, config, chunk=16, keep=False)
    assert all(
        torch.allclose(a.latents, b.latents, atol=1e-4) for (a, _), (b, _) in zip(after, again, strict=True)
    )


@pytest.mark.parametrize("recipe", ["tiny", "tiny-geneval"])
def test_a_step_moves_the_model_towards_the_better_samples(recipe: str):
    """How well the model explains a sample (its flow-matching error) grows more for good samples than for bad."""
    config = load(recipe)
    trainer = Trainer(load_model(config.model), config)
    keep = trainer.algorithm.needs_trajectory
    batch = scored(
        config, trainer.adapter, roll_out(trainer.adapter, trainer.sampler, config, chunk=15, keep=keep)
    )
    advantage = torch.tensor([value or 0.0 for value in trainer._advantages(batch).values])
    cond = batching.encode(trainer.adapter, [sample.prompt for sample in batch])
    clean = torch.stack([sample.latents for sample in batch])
    noise = torch.randn(8, *clean.shape, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def errors() -> torch.Tensor:
        found = []
        for step, eps in enumerate(noise):
            t = torch.full((len(clean),), 0.3 + 0.08 * step)
            level = t.view(-1, 1, 1, 1)
            v = batching.velocity(trainer.adapter, (1 - level) * clean + level * eps, t, cond)
            found.append((v - (eps - clean)).square().flatten(1).mean(1))
        return torch.stack(found).mean(0)

    before = errors()
    metrics = trainer.train(batch, 0)
    assert metrics["updates"] == config.train.updates
    assert metrics["grad_norm"] > 0
    gained = (before - errors()) / before
    assert float((advantage * gained).mean()) > 0
