"""Advantage Weighted Matching (arXiv 2509.25050): policy gradient on the flow-matching loss itself.

The log-likelihood of a clean latent x0 is stood in for by -mean (v - (eps - x0))^2 at x_t = (1 - t) x0 + t
eps, the loss that the model was pre-trained with. rho = exp of its change against the weights that made the
roll-out, at the same t and eps; the objective is the clipped one, plus kl mean (v - v_base)^2.
"""

from __future__ import annotations

from torch import Tensor

from spotlight.config import AlgorithmConfig
from spotlight.rl.algorithms import Points, mean_square
from spotlight.rl.algorithms.clipped import clipped_objective
from spotlight.rl.sampler import Sampler


class AWM:
    """Needs only (seed, clean latent, reward) of a sample, and the weights the iteration began with."""

    needs_trajectory = False
    needs_noise = False
    needs_old = True
    samples_from_old = False

    def __init__(self, config: AlgorithmConfig, sampler: Sampler) -> None:
        self._clip = config.clip
        self._kl = config.kl
        self.needs_base = config.kl > 0

    def old_decay(self, iteration: int) -> float:
        """The old weights are those of the last roll-out."""
        return 0.0

    def loss(
        self, points: Points, v: Tensor, *, old: Tensor | None = None, base: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of every point, (B,)."""
        assert old is not None
        assert points.noise is not None
        target = points.noise - points.clean
        log_ratio = mean_square(old - target) - mean_square(v - target)
        loss, metrics = clipped_objective(log_ratio, points.advantage, self._clip)
        if base is None:
            return loss, metrics
        distance = mean_square(v - base)
        return loss + self._kl * distance, metrics | {"kl": distance.detach()}
