"""Images per second of roll-out and training, phase by phase, beside a plain diffusers + peft loop.

Both do the same mathematics on the same noise with one Flow-GRPO iteration (SDE steps, log-probabilities, clipped
objective, LoRA, AdamW), and must end in the same loss. The plain loop is what one would write in a page: no
resumable state, no weight sets, no checks. Rounds come in pairs whose order alternates; the speed against the plain
loop is the median over pairs, the images per second are the best round's. A last pair is run with clocks in it, for
where the time goes, and with the peak of memory set back before each phase.

`tiny` is the embedded model, `mid` a random SD3 transformer of 256 tokens. On a GPU the share of the card's dense
bf16 rate is reported as well.

    python benchmarks/train_step.py --sizes tiny mid --samples 32
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spotlight.config import RunConfig, check
from spotlight.rl import batch, batching, denoise
from spotlight.rl.batch import TrainSample
from spotlight.rl.models.tiny import SymbolEncoder, TinyAdapter, build
from spotlight.rl.noise import initial_noise, step_noise
from spotlight.rl.train_step import Trainer

DENSE_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
RANK, ALPHA, CLIP, LR, GROUP = 16, 32, 1e-4, 1e-4, 8


@dataclass(frozen=True, slots=True)
class Size:
    """A model and the latents it works on."""

    make: Callable[[], tuple[SD3Transformer2DModel, SymbolEncoder]]
    pixels: tuple[int, int]


def mid() -> tuple[SD3Transformer2DModel, SymbolEncoder]:
    encoder = SymbolEncoder(dim=64, slots=32)
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=6,
        num_attention_heads=6,
        attention_head_dim=64,
        joint_attention_dim=64,
        caption_projection_dim=384,
        pooled_projection_dim=64,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
    )
    return transformer, encoder


SIZES = {"tiny": Size(build, (16, 32)), "mid": Size(mid, (32, 32))}


def model(size: Size, device: str, dtype: torch.dtype) -> TinyAdapter:
    """The same random weights at every call, none of them zero."""
    torch.manual_seed(0)
    transformer, encoder = size.make()
    for parameter in transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    torch.nn.Module.to(transformer.eval().requires_grad_(False), device, dtype)
    return TinyAdapter(transformer, encoder, "random")


class Ours:
    """Spotlight's own path: states, keyed noise, the trainer."""

    def __init__(self, size: Size, config: RunConfig, device: str, dtype: torch.dtype) -> None:
        self.adapter = model(size, device, dtype)
        self.trainer = Trainer(self.adapter, config)
        self.shape = self.adapter.latent_shape(*size.pixels)
        self.net, self.optimizer = self.adapter.transformer, self.trainer.optimizer

    def roll_out(self, ids: Sequence[tuple[int, int]], micro: int) -> list[TrainSample]:
        """Samples with their trajectories."""
        sampler = self.trainer.sampler
        done = []
        for start in range(0, len(ids), micro):
            part = ids[start : start + micro]
            states = [
                denoise.begin(r, s, version=0, sampler=sampler, run_seed=0, shape=self.shape) for r, s in part
            ]
            cond = batching.encode(self.adapter, [f"{row:03d}" for row, _ in part])
            done += denoise.denoise(self.adapter, sampler, cond, states, run_seed=0, keep_trajectory=True)
        return [TrainSample.of(s, f"{s.row:03d}", float(s.latents.mean())) for s in done]

    def train(self, samples: list[TrainSample], micro: int) -> float:
        """One update; the loss."""
        return self.trainer.train(samples, 0)["loss"]


class Plain:
    """A page of diffusers, peft and torch."""

    def __init__(self, size: Size, config: RunConfig, device: str, dtype: torch.dtype) -> None:
        self.adapter = model(size, device, dtype)
        self.net, self.device, self.dtype = self.adapter.transformer, device, dtype
        self.net.add_adapter(
            LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(self.adapter.lora_targets)), "default"
        )
        self.weights = [p for p in self.net.parameters() if p.requires_grad]
        for weight in self.weights:
            weight.data = weight.data.float()
        self.optimizer = torch.optim.AdamW(self.weights, lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
        self.shape = self.adapter.latent_shape(*size.pixels)
        self.sampler = Trainer(model(size, device, dtype), config).sampler  # for its sigmas and coefficients

    def velocity(self, x: Tensor, t: float, cond: tuple[Tensor, Tensor]) -> Tensor:
        """One forward."""
        time = torch.full((len(x),), t * 1000, device=self.device)
        return self.net(x.to(self.dtype), cond[0], cond[1], time, return_dict=False)[0].float()

    def encode(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Text side of the rows."""
        cond = self.adapter.encode([f"{row:03d}" for row in rows])
        return cond["embeds"].to(self.device, self.dtype), cond["pooled"].to(self.device, self.dtype)

    @torch.no_grad()
    def roll_out(self, ids: Sequence[tuple[int, int]], micro: int) -> list[dict[str, Any]]:
        """Batches with their trajectories."""
        chunks = []
        for start in range(0, len(ids), micro):
            part = ids[start : start + micro]
            cond = self.encode([row for row, _ in part])
            x = torch.stack([initial_noise(0, r, s, self.shape) for r, s in part]).to(self.device)
            kept, log_probs = [x], []
            for step in range(self.sampler.steps):
                v = self.velocity(x, self.sampler.sigmas[step], cond)
                if step in self.sampler.stochastic_steps:
                    z = torch.stack([step_noise(0, r, s, step, self.shape) for r, s in part]).to(self.device)
                    x = self.mean(x, v, step) + self.sampler.coefficients[step].std * z
                    log_probs.append(self.log_prob(x, kept[-1], v, step))
                    kept.append(x)
                else:
                    x = self.mean(x, v, step)
            chunks.append({"rows": [r for r, _ in part], "x": x, "kept": kept, "log_probs": log_probs})
        return chunks

    def mean(self, x: Tensor, v: Tensor, step: int) -> Tensor:
        """Of the next latent."""
        return self.sampler.coefficients[step].x * x + self.sampler.coefficients[step].v * v

    def log_prob(self, after: Tensor, x: Tensor, v: Tensor, step: int) -> Tensor:
        """Mean Gaussian log-density."""
        std = torch.tensor(self.sampler.coefficients[step].std, device=self.device)
        density = -((after - self.mean(x, v, step)) ** 2) / (2 * std**2) - std.log() - 0.9189385332
        return density.flatten(1).mean(1)

    def train(self, chunks: list[dict[str, Any]], micro: int) -> float:
        """One update; the loss."""
        rewards = torch.cat([chunk["x"].flatten(1).mean(1) for chunk in chunks]).view(-1, GROUP)
        advantage = (rewards - rewards.mean(1, keepdim=True)) / (
            rewards.std(1, correction=0, keepdim=True) + 1e-4
        )
        parts = advantage.flatten().clamp(-5, 5).split([len(chunk["x"]) for chunk in chunks])
        points = rewards.numel() * len(self.sampler.stochastic_steps)
        total = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for chunk, a in zip(chunks, parts, strict=True):
            cond = self.encode(chunk["rows"])
            for place, step in enumerate(self.sampler.stochastic_steps):
                x, after = chunk["kept"][place], chunk["kept"][place + 1]
                v = self.velocity(x, self.sampler.sigmas[step], cond)
                ratio = (self.log_prob(after, x, v, step) - chunk["log_probs"][place]).exp()
                loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP))
                (loss.sum() / points).backward()
                total += float(loss.detach().sum()) / points
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        return total


class Clocks:
    """Seconds by phase, of calls that are watched for a while."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, Counter[str]()

    @contextmanager
    def watching(self, subject: Ours | Plain) -> Iterator[None]:
        """Clocks around what both do: forward, backward, optimiser, keyed noise."""
        with ExitStack() as stack:
            for owner, attribute, phase in (
                (subject.net, "forward", "forward"),
                (Tensor, "backward", "backward"),
                (subject.optimizer, "step", "optimiser"),
                *((module, "step_noise", "noise") for module in (denoise, batch)),
                (denoise, "initial_noise", "noise"),
                *((sys.modules[__name__], name, "noise") for name in ("initial_noise", "step_noise")),
            ):
                stack.callback(setattr, owner, attribute, getattr(owner, attribute))
                setattr(owner, attribute, self._watched(getattr(owner, attribute), phase))
            yield

    def _watched(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            seconds, found = timed(lambda: call(*args, **kwargs), self.device)
            self.seconds[phase] += seconds
            return found

        return watched

    def shares(self, total: float) -> dict[str, float]:
        """Of `total` seconds, by phase; starts anew."""
        shares = {phase: round(seconds / total, 3) for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        return shares | {"rest": round(1 - sum(shares.values()), 3)}


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds and result. On the CPU they are those of this process, so that others on the machine do not count."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    found = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start, found


def reset_peak(device: str) -> None:
    """Start the peak of memory anew (on the CPU: Linux)."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif (path := Path("/proc/self/clear_refs")).exists():
        path.write_text("5")


def peak_bytes(device: str) -> int:
    """Largest memory since then: of tensors on a GPU, of the whole process on the CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flops_of_forward(size: Size, device: str, dtype: torch.dtype, micro: int) -> int:
    """Of one velocity of `micro` samples."""
    plain = Plain(size, run_config(micro), device, dtype)
    x = torch.zeros(micro, *plain.shape, device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain.velocity(x, 0.5, plain.encode([0] * micro))
    return counter.get_total_flops()


def run_config(micro: int) -> RunConfig:
    return check(
        {
            "sampler": {"kind": "sde", "steps": 4, "noise_level": 0.7},
            "algorithm": {"kind": "flow_grpo", "clip": CLIP},
            "train": {
                "mode": "lora",
                "lora_rank": RANK,
                "lora_alpha": ALPHA,
                "lr": LR,
                "updates": 1,
                "micro_batch": micro,
                "ratio_tolerance": 1e-2,
            },
        }
    )


def measure(name: str, samples: int, micro: int, rounds: int, device: str) -> dict[str, Any]:
    size, config = SIZES[name], run_config(micro)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ids = [(i // GROUP, i % GROUP) for i in range(samples)]
    seconds: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    for number in range(rounds):
        for kind in (Ours, Plain) if number % 2 else (Plain, Ours):  # who comes first meets colder caches
            subject, label = kind(size, config, device, dtype), kind.__name__.lower()
            roll_s, found = timed(lambda s=subject: s.roll_out(ids, micro), device)
            train_s, losses[label] = timed(lambda s=subject, f=found: s.train(f, micro), device)
            seconds.setdefault(f"{label}_roll_out", []).append(roll_s)
            seconds.setdefault(f"{label}_train", []).append(train_s)
    assert abs(losses["ours"] - losses["plain"]) < (1e-5 if device == "cpu" else 1e-2), losses
    best = {key: min(values) for key, values in seconds.items()}
    out: dict[str, Any] = {
        f"{key}_images_per_s": round(samples / value, 2) for key, value in best.items()
    } | {"loss_difference": abs(losses["ours"] - losses["plain"])}
    for phase in ("roll_out", "train"):
        pairs = zip(seconds[f"plain_{phase}"], seconds[f"ours_{phase}"], strict=True)
        ratios = sorted(plain / ours for plain, ours in pairs)
        out[f"{phase}_speed_vs_plain"] = round(median(ratios), 3)
        out[f"{phase}_speed_vs_plain_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    for kind in (Plain, Ours):
        out[kind.__name__.lower()] = phases(kind(size, config, device, dtype), ids, micro, device)
    forwards = flops_of_forward(size, device, dtype, micro) * samples / micro
    steps = config.sampler.steps
    rates = {
        "roll_out": forwards * steps / best["ours_roll_out"],
        "train": 3 * forwards * (steps - 1) / best["ours_train"],
    }
    out |= {f"{phase}_gflops_per_s": round(rate / 1e9, 1) for phase, rate in rates.items()}
    if device == "cuda":
        card = torch.cuda.get_device_name()
        dense = next((rate for key, rate in DENSE_BF16_FLOPS.items() if key in card), None)
        if dense:
            out |= {f"{phase}_share_of_bf16": round(rate / dense, 4) for phase, rate in rates.items()}
    return out


def phases(subject: Ours | Plain, ids: Sequence[tuple[int, int]], micro: int, device: str) -> dict[str, Any]:
    """Where the time of one more round goes, and the peak of memory."""
    clocks, out, given = Clocks(device), {}, ids
    for phase, work in (("roll_out", subject.roll_out), ("train", subject.train)):
        reset_peak(device)
        with clocks.watching(subject):
            total, given = timed(lambda work=work, given=given: work(given, micro), device)
        out[phase] = clocks.shares(total) | {"peak_bytes": peak_bytes(device)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object alone")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES], default=[*SIZES])
    parser.add_argument("--samples", type=int, default=32, help="a multiple of 8, the size of a group")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of timed rounds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.samples % GROUP:
        parser.error(f"--samples must be a multiple of {GROUP}")
    torch.set_num_threads(1)
    card = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    out: dict[str, Any] = {"device": card}
    for name in arguments.sizes:
        out[name] = measure(
            name, arguments.samples, arguments.micro_batch, arguments.rounds, arguments.device
        )
        if not arguments.json:
            print(f"{name}:")
            for key, value in out[name].items():
                print(f"  {key:<36}{value}")
    print(json.dumps(out))


if __name__ == "__main__":
    main()
