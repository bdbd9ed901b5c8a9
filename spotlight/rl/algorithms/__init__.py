"""Losses behind one protocol. One algorithm is one file; each is pure arithmetic on tensors.

A training *point* is a sample at one time of its path. The trainer makes points, asks the model for
velocities (under the trained, the old and the base weights, as the algorithm needs) and hands them to
`loss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spotlight.config import AlgorithmConfig
from spotlight.rl.registry import resolve
from spotlight.rl.sampler import Sampler

ALGORITHMS: dict[str, str] = {
    "flow_grpo": "spotlight.rl.algorithms.flow_grpo:FlowGRPO",
    "grpo_guard": "spotlight.rl.algorithms.grpo_guard:GRPOGuard",
    "nft": "spotlight.rl.algorithms.nft:DiffusionNFT",
    "awm": "spotlight.rl.algorithms.awm:AWM",
}

RATIO_DEVIATION = "ratio_dev"  # the metric |ratio - 1|: its largest is reported, and checked at update 1


@dataclass(frozen=True, slots=True)
class Points:
    """B training points; latents are (B, *latent_shape), the rest (B,), all fp32.

    On a kept trajectory `x` is x_t, `x_next` what the sampler made of it and `noise` its z, which is None for an
    algorithm that does without. In the forward process x = (1 - t) `clean` + t `noise`, and `x_next` and
    `old_log_prob` are None.
    """

    x: Tensor
    t: Tensor
    steps: tuple[int, ...]  # the denoising step of each point
    advantage: Tensor
    clean: Tensor
    noise: Tensor | None
    x_next: Tensor | None = None
    old_log_prob: Tensor | None = None


class Algorithm(Protocol):
    """What the trainer must know of a loss."""

    needs_trajectory: bool  # points lie on the kept trajectory; otherwise on the forward process
    needs_noise: bool  # that of the trajectory; the forward process always has its own
    needs_old: bool  # the velocity under the old weights
    needs_base: bool  # the velocity under the base model
    samples_from_old: bool  # roll-outs use the old weights, not the trained ones

    def old_decay(self, iteration: int) -> float:
        """d in old <- d old + (1 - d) theta, applied after `iteration` (from 0)."""
        ...

    def loss(
        self, points: Points, v: Tensor, *, old: Tensor | None = None, base: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (B,) of every point, differentiable in `v`, and metrics (B,) without gradient."""
        ...


def load_algorithm(config: AlgorithmConfig, sampler: Sampler) -> Algorithm:
    """The algorithm named by `config.kind`. Raises ConfigError."""
    algorithm: Algorithm = resolve(config.kind, ALGORITHMS, "algorithm.kind")(config, sampler)
    return algorithm


def mean_square(difference: Tensor) -> Tensor:
    """(B,): mean of squares over all elements of a row."""
    return difference.square().flatten(1).mean(1)
