"""Flow-GRPO (arXiv 2505.05470): policy gradient on the Gaussian steps of the SDE or CPS sampler.

L = max(-A rho, -A clip(rho, 1 +- eps)) + beta KL, rho = exp(log p - log p_old), both log-probabilities means
over elements. KL is the exact divergence of two Gaussians of equal variance, |mu - mu_base|^2 / (2 std^2),
as a mean over elements; for the SDE step it equals |dt|/2 (1/s + s (1 - t)/(2t))^2 |v - v_base|^2. (The
public code leaves out the factor |dt|: its beta values are larger than ours by about that factor.)

Log-probabilities are means, so a clip belongs to a resolution: in nats it loosens with the number of
elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spotlight.config import AlgorithmConfig
from spotlight.rl.algorithms import Points, mean_square
from spotlight.rl.algorithms.clipped import clipped_objective
from spotlight.rl.sampler import Sampler


class FlowGRPO:
    """Needs the kept trajectory and its log-probabilities; the base model only when `kl` > 0."""

    needs_trajectory = True
    needs_noise = False
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
        loss, metrics = self.objective(points, v)
        if base is None:
            return loss, metrics
        kl = gaussian_kl(self._sampler, points, v, base)
        return loss + self._kl * kl, metrics | {"kl": kl.detach()}

    def objective(self, points: Points, v: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss without its KL term, and the metrics, (B,)."""
        return clipped_objective(self.log_ratio(points, v), points.advantage, self._clip)

    def log_ratio(self, points: Points, v: Tensor) -> Tensor:
        """(B,): log p - log p_old."""
        assert points.x_next is not None
        assert points.old_log_prob is not None
        return self._sampler.log_prob(points.x_next, points.x, v, points.steps) - points.old_log_prob


def gaussian_kl(sampler: Sampler, points: Points, v: Tensor, base: Tensor) -> Tensor:
    """(B,): KL per element between the steps that `v` and `base` make from the same x."""
    scale = torch.tensor([_shift_per_std(sampler, step) for step in points.steps], device=v.device)
    return 0.5 * scale.square() * mean_square(v - base)


def _shift_per_std(sampler: Sampler, step: int) -> float:
    """How far a unit change of the velocity moves the mean, in standard deviations."""
    coefficients = sampler.coefficients[step]
    return coefficients.v / coefficients.std
