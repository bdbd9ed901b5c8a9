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

from spotlight.rl.algorithms import Points, mean_square
from spotlight.rl.algorithms.clipped import clipped_objective
from spotlight.rl.algorithms.flow_grpo import FlowGRPO


class GRPOGuard(FlowGRPO):
    """Needs the noise of the trajectory as well: the old mean is what was sampled less its own noise."""

    needs_noise = True

    def objective(self, points: Points, v: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `FlowGRPO.objective`."""
        assert points.x_next is not None
        assert points.noise is not None
        sampler, steps = self._sampler, points.steps
        std = sampler.std(steps, v)
        old_mean = points.x_next - std * points.noise
        shift = mean_square((sampler.mean(points.x, v, steps) - old_mean) / std) / 2
        log_ratio = (self.log_ratio(points, v) + shift) * std.flatten()
        loss, metrics = clipped_objective(log_ratio, points.advantage, self._clip)
        dt = [sampler.sigmas[step] - sampler.sigmas[step + 1] for step in steps]
        return loss / torch.tensor(dt, device=v.device), metrics
