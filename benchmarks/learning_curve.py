"""Held-out score over iterations in one process: is there something to learn, and do drafted seeds help?

The mathematics of a run without its cluster: the same recipe, sampler, reward, trainer and seed selection.
With `--drafts N` every group's seeds are chosen from N drafts made with weights one version old, as spot
nodes make them while the trainer trains; with 0 the seeds are random. One JSON line per validation.

    python benchmarks/learning_curve.py --drafts 24 --set seed=1
    python benchmarks/learning_curve.py tiny-geneval --grid after.png
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image

from spotlight import config as configuration
from spotlight.config import RunConfig
from spotlight.core.select import max_variance_subset
from spotlight.rl import batching, data, params
from spotlight.rl.batch import TrainSample
from spotlight.rl.data import Prompt
from spotlight.rl.denoise import DenoiseState, begin, denoise
from spotlight.rl.models import load_model
from spotlight.rl.rewards import Scores, combine, load_reward
from spotlight.rl.sampler import Sampler, evaluation_sampler
from spotlight.rl.train_step import Trainer

SEEDS_PER_ITERATION = 65536
EVAL_SEED = 0


class Run:
    """One seed of one arm."""

    def __init__(self, config: RunConfig, drafts: int) -> None:
        self.config, self.drafts = config, drafts
        self.adapter = load_model(config.model)
        self.trainer = Trainer(self.adapter, config)
        self.train_rows = data.load(config.data.train)
        self.held_out = data.load(config.data.validation)[: config.data.validation_size]
        self.reward, self.report = combine(config.reward.train), load_reward(config.reward.held_out)
        self.stale = self.trainer.trainable()
        self.images_drafted = 0

    def sample(self, pairs: Sequence[tuple[Prompt, int]], sampler: Sampler, keep: bool) -> list[DenoiseState]:
        """The final states of these (prompt, seed) pairs."""
        model, seed = self.config.model, self.config.seed
        shape = self.adapter.latent_shape(model.height, model.width)
        states = [
            begin(prompt.row, j, version=0, sampler=sampler, run_seed=seed, shape=shape)
            for prompt, j in pairs
        ]
        cond = batching.encode(self.adapter, [prompt.text for prompt, _ in pairs])
        return denoise(self.adapter, sampler, cond, states, run_seed=seed, keep_trajectory=keep)

    def images(self, states: Sequence[DenoiseState]) -> torch.Tensor:
        """(B, 1 or 3, height, width) in [0, 1]."""
        return batching.decode(self.adapter, torch.stack([state.latents for state in states]))

    def rewards(self, pairs: Sequence[tuple[Prompt, int]], states: Sequence[DenoiseState]) -> Scores:
        """Scores of what is trained on."""
        prompts = [prompt for prompt, _ in pairs]
        return self.reward.score(
            self.images(states), [p.text for p in prompts], [p.metadata for p in prompts]
        )

    def choose(self, prompts: Sequence[Prompt], iteration: int) -> list[tuple[Prompt, int]]:
        """The (prompt, seed) pairs to train on."""
        first, size = iteration * SEEDS_PER_ITERATION, self.config.data.group_size
        if not self.drafts:
            return [(prompt, first + j) for prompt in prompts for j in range(size)]
        pairs = [(prompt, first + j) for prompt in prompts for j in range(self.drafts)]
        with params.bound(self.adapter.transformer, self.stale):
            drafts = self.sample(pairs, self.trainer.sampler, keep=False)
        self.images_drafted += len(drafts)
        values = self.rewards(pairs, drafts).values
        chosen = []
        for start in range(0, len(pairs), self.drafts):
            kept = max_variance_subset(values[start : start + self.drafts], size)
            chosen += [pairs[start + j] for j in kept]
        return chosen

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; the trainer's metrics."""
        prompts = data.batch(
            self.train_rows, iteration, self.config.data.prompts_per_iteration, self.config.seed
        )
        pairs = self.choose(prompts, iteration)
        with self.trainer.rolling_out():
            finals = self.sample(pairs, self.trainer.sampler, keep=True)
        rewards = self.rewards(pairs, finals).values
        batch = [
            TrainSample.of(state, prompt.text, reward)
            for state, (prompt, _), reward in zip(finals, pairs, rewards, strict=True)
        ]
        self.stale = self.trainer.trainable()
        return self.trainer.train(batch, iteration)

    def validate(self) -> tuple[float, torch.Tensor]:
        """Mean held-out score of the averaged weights, and the pictures."""
        with params.bound(self.adapter.transformer, self.trainer.ema_tensors()):
            pairs = [(prompt, EVAL_SEED) for prompt in self.held_out]
            states = self.sample(pairs, evaluation_sampler(self.config.sampler), keep=False)
        pictures = self.images(states)
        texts, metadata = [p.text for p in self.held_out], [p.metadata for p in self.held_out]
        values = [v for v in self.report.score(pictures, texts, metadata).values if v is not None]
        return sum(values) / len(values), pictures

    def curve(self) -> Iterator[dict[str, float]]:
        """A point per validation, iteration 0 being the base."""
        started = time.process_time()
        metrics: dict[str, float] = {}
        for iteration in range(self.config.iterations + 1):
            if iteration % self.config.eval_every == 0 or iteration == self.config.iterations:
                spent = time.process_time() - started
                score, self.pictures = self.validate()
                started = time.process_time() - spent  # validation is not part of an iteration
                yield {"iteration": iteration, "score": round(score, 4), "cpu_s": round(spent, 1), **metrics}
            if iteration < self.config.iterations:
                metrics = {name: round(value, 5) for name, value in self.iterate(iteration).items()}


def grid(pictures: torch.Tensor, path: Path, columns: int = 12) -> None:
    tiles = (pictures.expand(-1, 3, -1, -1) * 255).round().byte().permute(0, 2, 3, 1)
    rows = tiles[: len(tiles) // columns * columns].unflatten(0, (-1, columns))
    Image.fromarray(rows.transpose(1, 2).flatten(2, 3).flatten(0, 1).numpy()).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="tiny")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override the recipe")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of each prompt; 0: random seeds")
    parser.add_argument("--grid", type=Path, help="write the last validation pictures here (PNG)")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(configuration.load(options.recipe, options.set), options.drafts)
    curve = []
    for point in run.curve():
        curve.append(point)
        if not options.json:
            print(json.dumps(point), flush=True)
    if options.grid:
        grid(run.pictures, options.grid)
    scores = {point["iteration"]: point["score"] for point in curve}
    summary = {"drafts": options.drafts, "seed": run.config.seed, "scores": scores}
    summary |= {"gain": round(curve[-1]["score"] - curve[0]["score"], 4), "cpu_s": curve[-1]["cpu_s"]}
    print(json.dumps(summary | {"images_drafted": run.images_drafted}))


if __name__ == "__main__":
    main()
