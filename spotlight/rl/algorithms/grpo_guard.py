"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a ratio that is centred and scaled alike at every step.

The mean-log-prob ratio sits below 1, the more so at low noise, and its spread differs between steps, so one
clip binds at some steps only. With kappa the step's standard deviation and b = mean (mu - mu_old)^2 / (2
kappa^2), rho = exp((log p - log p_old + b) kappa) and the clipped loss is divided by |dt|. b cancels the
quadratic term of the log-ratio and leaves the linear one, mean z (mu - mu_old) / kappa: zero on average
under the old policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spotlight.config import AlgorithmConfig
from spotlight.rl.algorithms import Points, mean_square
from spotlight.rl.algorithms.clipped import clipped_objective
from spotlight.rl.algorithms.flow_grpo import gaussian_kl
from spotlight.rl.sampler import Sampler


class GRPOGuard:
    """Needs the kept trajectory; the old mean is what was sampled less its own noise."""

    needs_trajectory = True
    needs_old = False
    samples_from_old = False

    def __init__(self, config: AlgorithmConfig, sampler: Sampler) -> None:
        self._clip = config.clip
        self._kl = config.kl
        self._sampler = sampler
        self.needs_base = config.kl > 0

    def old_decay(self, iteration: int) -> float:
        """No old weights."""
        return 0.0

    def loss(
        self, points: Points, v: Tensor, *, old: Tensor | None = None, base: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of every point, (B,)."""
        assert points.x_next is not None
        assert points.old_log_prob is not None
        sampler, steps = self._sampler, points.steps
        std = sampler.std(steps, v)
        old_mean = points.x_next - std * points.noise
        shift = mean_square((sampler.mean(points.x, v, steps) - old_mean) / std) / 2
        log_ratio = sampler.log_prob(points.x_next, points.x, v, steps) - points.old_log_prob
        loss, metrics = clipped_objective((log_ratio + shift) * std.flatten(), points.advantage, self._clip)
        dt = [sampler.sigmas[step] - sampler.sigmas[step + 1] for step in steps]
        loss = loss / torch.tensor(dt, device=v.device)
        if base is None:
            return loss, metrics
        kl = gaussian_kl(sampler, points, v, base)
        return loss + self._kl * kl, metrics | {"kl": kl.detach()}
