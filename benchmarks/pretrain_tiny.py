"""Pre-train the embedded tiny model by flow matching on drawn digits, until its digits are half legible.

Deterministic for a seed on one machine, a few CPU-minutes on one thread. Training stops on *accuracy*, looked
at every 50 steps: at a fixed time it varies too much from seed to seed. The 200 held-out strings of
`builtin:digits-held-out` are never drawn for training, so what RL gains on them is not remembered from here;
the first 96 of them decide when to stop.

    python benchmarks/pretrain_tiny.py --out spotlight/assets/tiny
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from spotlight.rl import data
from spotlight.rl.models import tiny
from spotlight.rl.rewards.ocr import EditReward

HEIGHT, WIDTH = 16, 32
FONTS = ("DejaVuSans-Bold.ttf", "DejaVuSerif-Bold.ttf")  # matplotlib carries them: no system font is needed
LENGTHS = (1, 2, 3)
LENGTH_WEIGHTS = (2, 6, 92)  # RL is about three digits; shorter ones are drawn so that the model can do them
PICTURES = 16_000
BATCH, LR, WARMUP, MAX_GRAD_NORM, CAPTION_DROP = 32, 2e-3, 60, 1.0, 0.08
ODE_STEPS, EVAL_EVERY, EVAL_ROWS = 4, 50, 96


@dataclass
class Progress:
    """One look at the averaged weights."""

    step: int
    loss: float
    edit_score: float
    cpu_s: float


@cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)


def draw(text: str, rng: random.Random) -> np.ndarray:
    """Grey (16, 32) uint8: dark digits on light paper, jittered in place, ink, font and angle."""
    face = font(rng.choice(FONTS), rng.choice((11, 12, 13)))
    paper, ink = rng.randint(200, 255), rng.randint(0, 110)
    picture = Image.new("L", (WIDTH, HEIGHT), paper)
    canvas = ImageDraw.Draw(picture)
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=face)
    x = (WIDTH - right - left) / 2 + rng.uniform(-1.5, 1.5)
    y = (HEIGHT - bottom - top) / 2 + rng.uniform(-1, 1)
    canvas.text((x, y), text, font=face, fill=ink)
    turned = picture.rotate(rng.uniform(-3, 3), resample=Image.Resampling.BILINEAR, fillcolor=paper)
    return np.asarray(turned, dtype=np.uint8)


def corpus(seed: int) -> tuple[list[str], Tensor]:
    """Texts without the held-out ones and their pictures (N, 1, 16, 32) in [-1, 1]."""
    rng = random.Random(seed)
    held_out = {prompt.text for prompt in data.load("builtin:digits-held-out")}
    texts: list[str] = []
    while len(texts) < PICTURES:
        text = "".join(rng.choices("0123456789", k=rng.choices(LENGTHS, LENGTH_WEIGHTS)[0]))
        if text not in held_out:
            texts.append(text)
    pictures = np.stack([draw(text, rng) for text in texts])
    return texts, torch.from_numpy(pictures)[:, None].float() / 127.5 - 1


class Pretraining:
    """Weights, their average, and the flow-matching step."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.models = tiny.build()
        self.averaged = copy.deepcopy(self.models)
        self.generator = torch.Generator().manual_seed(seed)
        self.texts, self.pictures = corpus(seed)
        self.ids = self.models[1].ids(self.texts)
        self.optimiser = torch.optim.AdamW(self._parameters(self.models), LR, betas=(0.9, 0.98))
        self.step_count = 0

    @staticmethod
    def _parameters(models: tuple[torch.nn.Module, ...]) -> list[torch.nn.Parameter]:
        return [parameter for model in models for parameter in model.parameters()]

    def step(self) -> float:
        """One update on v = eps - x0 with logit-normal t; returns the loss."""
        transformer, encoder = self.models
        chosen = torch.randint(len(self.pictures), (BATCH,), generator=self.generator)
        clean, ids = self.pictures[chosen], self.ids[chosen].clone()
        ids[torch.rand(BATCH, generator=self.generator) < CAPTION_DROP] = encoder.ids([""])[0]
        t = torch.sigmoid(torch.randn(BATCH, generator=self.generator))
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


def velocity(
    transformer: torch.nn.Module, encoder: torch.nn.Module, x: Tensor, t: Tensor, ids: Tensor
) -> Tensor:
    embeds, pooled = encoder(ids)
    return transformer(x, embeds, pooled, t * 1000, return_dict=False)[0]


@torch.no_grad()
def held_out_score(models: tuple[torch.nn.Module, ...]) -> tuple[float, list[str]]:
    """Mean edit score of the first held-out rows by ODE-4 from one fixed noise each, and the readings."""
    prompts = data.load("builtin:digits-held-out")[:EVAL_ROWS]
    ids = models[1].ids([prompt.text for prompt in prompts])
    x = torch.randn(EVAL_ROWS, 1, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(5))
    for step in range(ODE_STEPS):
        x = x - velocity(*models, x, torch.full((EVAL_ROWS,), 1 - step / ODE_STEPS), ids) / ODE_STEPS
    metadata = [prompt.metadata for prompt in prompts]
    scores = EditReward().score((x.clamp(-1, 1) + 1) / 2, [prompt.text for prompt in prompts], metadata)
    return float(np.mean([value for value in scores.values if value is not None])), scores.info["reading"]


def pretrain(run: Pretraining, target: float, max_steps: int) -> Iterator[Progress]:
    """Steps until the averaged weights reach the target; yields a look every EVAL_EVERY steps."""
    started, loss = time.process_time(), 0.0
    while run.step_count < max_steps:
        loss += run.step() / EVAL_EVERY
        if run.step_count % EVAL_EVERY == 0:
            score, _ = held_out_score(run.averaged)
            yield Progress(
                run.step_count, round(loss, 4), round(score, 4), round(time.process_time() - started, 1)
            )
            loss = 0.0
            if score >= target:
                return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.57, help="held-out edit score to stop at")
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    run, progress = Pretraining(options.seed), None
    for progress in pretrain(run, options.target, options.max_steps):
        if not options.json:
            print(progress, flush=True)
    tiny.save(options.out, *run.averaged)
    print(
        json.dumps(vars(progress) | {"seed": options.seed, "reached": progress.edit_score >= options.target})
    )


if __name__ == "__main__":
    main()
