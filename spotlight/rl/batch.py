"""From rewarded samples to training points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from spotlight.errors import IntegrityError
from spotlight.rl.algorithms import Points
from spotlight.rl.denoise import DenoiseState
from spotlight.rl.noise import forward_noise, generator, step_noise
from spotlight.rl.sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """A finished, rewarded sample. Tensors fp32 on the CPU, without a batch dimension.

    `kept` (window + 1, *latent_shape) and `log_probs` (window,) come from the roll-out of a trajectory-based
    algorithm and are None otherwise. A reward that failed is None.
    """

    row: int
    seed: int
    prompt: str
    latents: Tensor  # clean
    reward: float | None
    kept: Tensor | None = None
    log_probs: Tensor | None = None

    @classmethod
    def of(cls, state: DenoiseState, prompt: str, reward: float | None) -> TrainSample:
        """From the state at the end of denoising."""
        kept, log_probs = (state.kept, state.log_probs) if len(state.kept) else (None, None)
        return cls(state.row, state.seed, prompt, state.latents, reward, kept, log_probs)

    @property
    def finite(self) -> bool:
        """Whether every number of its tensors is one."""
        tensors = [t for t in (self.latents, self.kept, self.log_probs) if t is not None]
        return all(bool(t.isfinite().all()) for t in tensors)


@dataclass(frozen=True, slots=True)
class PointRef:
    """One training point: a sample of the batch (by index), its advantage, a denoising step."""

    sample: int
    advantage: float
    step: int


def check_batch(batch: Sequence[TrainSample], sampler: Sampler, *, needs_trajectory: bool) -> None:
    """Raise IntegrityError for a sample that comes twice or lacks the trajectory."""
    seen: set[tuple[int, int]] = set()
    window = len(sampler.stochastic_steps)
    for sample in batch:
        who = f"row {sample.row} seed {sample.seed}"
        if (sample.row, sample.seed) in seen:
            raise IntegrityError(f"{who} comes twice in one training batch")
        seen.add((sample.row, sample.seed))
        if not needs_trajectory:
            continue
        if sample.kept is None or sample.log_probs is None:
            raise IntegrityError(f"{who} has no trajectory, which this algorithm trains on")
        if len(sample.kept) != window + 1 or len(sample.log_probs) != window:
            raise IntegrityError(
                f"{who} keeps {len(sample.kept)} latents and {len(sample.log_probs)} log-probabilities "
                f"for {window} stochastic steps"
            )


def minibatches(
    usable: Sequence[tuple[int, float]],
    steps: Sequence[int],
    *,
    updates: int,
    steps_trained: int,
    run_seed: int,
    iteration: int,
) -> list[list[PointRef]]:
    """Points of each optimiser step: samples in an order, with steps, that (run_seed, iteration) determine.

    `usable` are (index, advantage); each sample comes in exactly one update, with `steps_trained` of `steps`
    (0: all of them). Updates that would be empty are left out.
    """
    rng = generator("minibatches", run_seed, iteration)
    order = rng.permutation(len(usable))
    count = min(steps_trained or len(steps), len(steps))
    refs = {
        int(i): [
            PointRef(usable[i][0], usable[i][1], steps[k])
            for k in sorted(rng.choice(len(steps), count, replace=False))
        ]
        for i in order
    }
    bounds = [round(part * len(order) / updates) for part in range(updates + 1)]
    chunks = [order[start:stop] for start, stop in pairwise(bounds) if stop > start]
    return [[ref for i in chunk for ref in refs[int(i)]] for chunk in chunks]


def trajectory_points(
    batch: Sequence[TrainSample],
    refs: Sequence[PointRef],
    sampler: Sampler,
    *,
    run_seed: int,
    device: torch.device,
    with_noise: bool,
) -> Points:
    """Points on the kept trajectories; the noise of their steps is drawn again where it is wanted."""
    samples = [batch[ref.sample] for ref in refs]
    places = [ref.step - sampler.window[0] for ref in refs]
    kept = [sample.kept for sample in samples]
    log_probs = [sample.log_probs for sample in samples]
    noise = [
        step_noise(run_seed, s.row, s.seed, ref.step, s.latents.shape)
        for s, ref in zip(samples, refs, strict=True)
        if with_noise
    ]
    return Points(
        x=_stack([k[place] for k, place in zip(kept, places, strict=True) if k is not None], device),
        noise=_stack(noise, device) if noise else None,
        x_next=_stack([k[place + 1] for k, place in zip(kept, places, strict=True) if k is not None], device),
        old_log_prob=_stack(
            [p[at] for p, at in zip(log_probs, places, strict=True) if p is not None], device
        ),
        **_common(samples, refs, sampler, device),
    )


def forward_points(
    batch: Sequence[TrainSample],
    refs: Sequence[PointRef],
    sampler: Sampler,
    *,
    run_seed: int,
    iteration: int,
    device: torch.device,
) -> Points:
    """Points of the forward process, at the sampler's own times and with fresh keyed noise."""
    samples = [batch[ref.sample] for ref in refs]
    noise = _stack(
        [
            forward_noise(run_seed, s.row, s.seed, iteration, ref.step, s.latents.shape)
            for s, ref in zip(samples, refs, strict=True)
        ],
        device,
    )
    common = _common(samples, refs, sampler, device)
    t = common["t"].view(-1, *[1] * (noise.dim() - 1))
    return Points(x=(1 - t) * common["clean"] + t * noise, noise=noise, **common)


def _common(
    samples: Sequence[TrainSample], refs: Sequence[PointRef], sampler: Sampler, device: torch.device
) -> dict:
    return {
        "t": torch.tensor([sampler.sigmas[ref.step] for ref in refs], device=device),
        "steps": tuple(ref.step for ref in refs),
        "advantage": torch.tensor([ref.advantage for ref in refs], device=device),
        "clean": _stack([sample.latents for sample in samples], device),
    }


def _stack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([tensor.float() for tensor in tensors]).to(device)
