"""Small whole roll-outs for tests of the training side: begin, denoise, reward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.random_sd3 import RandomSD3
from torch import Tensor

from spotlight.config import RunConfig, TrainConfig, check
from spotlight.rl import batching, export, params
from spotlight.rl.batch import TrainSample
from spotlight.rl.denoise import DenoiseState, begin, denoise
from spotlight.rl.sampler import Sampler
from spotlight.rl.train_step import Trainer

HEIGHT, WIDTH = 16, 32


def make_config(**sections: dict[str, Any]) -> RunConfig:
    """A checked config from sections of plain data."""
    return check(sections)


def start(
    ids: list[tuple[int, int]],
    sampler: Sampler,
    *,
    run_seed: int = 0,
    shape: tuple[int, ...] = (1, HEIGHT, WIDTH),
) -> list[DenoiseState]:
    """States before the first step for (row, seed) pairs."""
    return [begin(r, s, version=0, sampler=sampler, run_seed=run_seed, shape=shape) for r, s in ids]


def finish(
    adapter: RandomSD3,
    sampler: Sampler,
    states: list[DenoiseState],
    *,
    chunk: int = 64,
    run_seed: int = 0,
    keep: bool = True,
    on_step: Callable[[list[DenoiseState]], bool] | None = None,
) -> list[DenoiseState]:
    """Denoise to the end in chunks."""
    done: list[DenoiseState] = []
    for at in range(0, len(states), chunk):
        part = states[at : at + chunk]
        cond = batching.encode(adapter, [prompt_of(state.row) for state in part])
        negative = batching.encode(adapter, [""] * len(part)) if sampler.cfg != 1 else None
        done += denoise(
            adapter,
            sampler,
            cond,
            part,
            run_seed=run_seed,
            keep_trajectory=keep,
            negative=negative,
            on_step=on_step,
        )
    return done


def prompt_of(row: int) -> str:
    """Rows 1 and 1001 share a text: groups are rows."""
    return f"{row % 1000:03d}"


def roll_out(
    trainer: Trainer,
    iteration: int = 0,
    *,
    groups: int = 4,
    size: int = 4,
    chunk: int = 64,
    reward: Callable[[Tensor], Any] = lambda latents: float(latents.mean()),
) -> list[TrainSample]:
    """Fresh, rewarded samples made with the weights the trainer publishes."""
    ids = [(row, 65536 * iteration + j) for row in range(groups) for j in range(size)]
    states = start(ids, trainer.sampler, run_seed=trainer.config.seed)
    with params.bound(trainer.adapter.transformer, trainer.trainable()):
        done = finish(
            trainer.adapter,
            trainer.sampler,
            states,
            chunk=chunk,
            run_seed=trainer.config.seed,
            keep=trainer.algorithm.needs_trajectory,
        )
    return [TrainSample.of(state, prompt_of(state.row), reward(state.latents)) for state in done]


def export_of(
    adapter: Any,
    weights: params.Weights,
    config: TrainConfig,
    folder: Path,
    *,
    shape: Any,
    fresh: Any,
    **more: Any,
) -> Path:
    """Export `weights`, compared with what `adapter` answers when it holds them."""
    with params.bound(adapter.transformer, weights):
        expected = export.probe(adapter, shape, more.get("prompt", ""))
    return export.export(weights, config, folder, expected=expected, shape=shape, fresh=fresh, **more)
