"""Pre-train an embedded tiny model by flow matching on drawn pictures, until half of what it draws is right.

Deterministic for a seed on one machine, a few CPU-minutes on one thread. Training stops on *accuracy*, looked
at every 50 steps: at a fixed time it varies too much from seed to seed. Held-out prompts are never drawn for
training, so what RL gains on them is not remembered from here; the first 96 of them decide when to stop.

    python benchmarks/pretrain_tiny.py tiny --out spotlight/assets/tiny
    python benchmarks/pretrain_tiny.py tiny-shapes --out spotlight/assets/tiny-shapes
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiny_pictures
import torch
from torch import Tensor

from spotlight.rl import builtin, data
from spotlight.rl.models import tiny
from spotlight.rl.rewards import load_reward

Models = tuple[torch.nn.Module, ...]  # transformer and text encoder

BATCH, LR, WARMUP, MAX_GRAD_NORM, CAPTION_DROP = 32, 2e-3, 60, 1.0, 0.08
ODE_STEPS, EVAL_EVERY, EVAL_ROWS = 4, 50, 96


@dataclass(frozen=True, slots=True)
class Base:
    """What a model is built like, shown, and judged by."""

    build: Callable[[], Models]
    corpus: Callable[[int], tuple[list[str], Tensor]]  # by seed: prompts and pictures (N, C, H, W) in [-1, 1]
    held_out: str
    reward: str
    target: float
    time_shift: float = 0.0  # added to the logit of t: a scene is composed while there is much noise


BASES = {
    "tiny": Base(tiny.build, tiny_pictures.digits, "builtin:digits-held-out", "ocr", 0.57),
    "tiny-shapes": Base(
        lambda: tiny.build(tiny.SymbolEncoder(builtin.SCENE_WORDS, slots=8, dim=64, words=True), channels=3),
        tiny_pictures.scenes,
        "builtin:shapes-held-out",
        "geneval_shapes",
        target=0.4,
        time_shift=0.5,
    ),
}


@dataclass
class Progress:
    """One look at the averaged weights."""

    step: int
    loss: float
    score: float
    cpu_s: float


class Pretraining:
    """Weights, their average, and the flow-matching step."""

    def __init__(self, base: Base, seed: int) -> None:
        torch.manual_seed(seed)
        self.base = base
        self.models = base.build()
        self.averaged = copy.deepcopy(self.models)
        self.generator = torch.Generator().manual_seed(seed)
        self.texts, self.pictures = base.corpus(seed)
        self.ids = self.models[1].ids(self.texts)
        self.optimiser = torch.optim.AdamW(self._parameters(self.models), LR, betas=(0.9, 0.98))
        self.step_count = 0

    @staticmethod
    def _parameters(models: Models) -> list[torch.nn.Parameter]:
        return [parameter for model in models for parameter in model.parameters()]

    def step(self) -> float:
        """One update on v = eps - x0 with logit-normal t; returns the loss."""
        transformer, encoder = self.models
        chosen = torch.randint(len(self.pictures), (BATCH,), generator=self.generator)
        clean, ids = self.pictures[chosen], self.ids[chosen].clone()
        ids[torch.rand(BATCH, generator=self.generator) < CAPTION_DROP] = encoder.ids([""])[0]
        t = torch.sigmoid(torch.randn(BATCH, generator=self.generator) + self.base.time_shift)
        noise = torch.randn(clean.shape, generator=self.generator)
        level = t.view(-1, 1, 1, 1)
        predicted = velocity(transformer, encoder, clean * (1 - level) + noise * level, t, ids)
        loss = (predicted - (noise - clean)).square().mean()
        self.optimiser.zero_grad()
        loss.backward()
        parameters = self._parameters(self.models)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        self.optimiser.param_groups[0]["lr"] = LR * min(1, (self.step_count + 1) / WARMUP)
        self.optimiser.step()
        self.step_count += 1
        decay = min(0.99, self.step_count / (self.step_count + 20))
        with torch.no_grad():
            torch._foreach_lerp_(self._parameters(self.averaged), parameters, 1 - decay)
        return loss.item()

    @torch.no_grad()
    def held_out_score(self) -> float:
        """Mean score of the first held-out rows by ODE-4 from one fixed noise each, with averaged weights."""
        prompts = data.load(self.base.held_out)[:EVAL_ROWS]
        texts = [prompt.text for prompt in prompts]
        ids = self.averaged[1].ids(texts)
        x = torch.randn(len(ids), *self.pictures.shape[1:], generator=torch.Generator().manual_seed(5))
        for step in range(ODE_STEPS):
            x = (
                x
                - velocity(*self.averaged, x, torch.full((len(ids),), 1 - step / ODE_STEPS), ids) / ODE_STEPS
            )
        images, metadata = (x.clamp(-1, 1) + 1) / 2, [prompt.metadata for prompt in prompts]
        values = load_reward(self.base.reward).score(images, texts, metadata).values
        return float(np.mean([value for value in values if value is not None]))


def velocity(
    transformer: torch.nn.Module, encoder: torch.nn.Module, x: Tensor, t: Tensor, ids: Tensor
) -> Tensor:
    embeds, pooled = encoder(ids)
    return transformer(x, embeds, pooled, t * 1000, return_dict=False)[0]


def pretrain(run: Pretraining, target: float, max_steps: int) -> Iterator[Progress]:
    """Steps until the averaged weights reach the target; yields a look every EVAL_EVERY steps."""
    started, loss = time.process_time(), 0.0
    while run.step_count < max_steps:
        loss += run.step() / EVAL_EVERY
        if run.step_count % EVAL_EVERY == 0:
            score = run.held_out_score()
            spent = time.process_time() - started
            yield Progress(run.step_count, round(loss, 4), round(score, 4), round(spent, 1))
            loss = 0.0
            if score >= target:
                return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", choices=[*BASES])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=float, help="held-out score to stop at, if not the base's own")
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    base = BASES[options.base]
    target = base.target if options.target is None else options.target
    run, progress = Pretraining(base, options.seed), None
    for progress in pretrain(run, target, options.max_steps):
        if not options.json:
            print(progress, flush=True)
    tiny.save(options.out, *run.averaged)
    print(json.dumps(vars(progress) | {"seed": options.seed, "reached": progress.score >= target}))


if __name__ == "__main__":
    main()
