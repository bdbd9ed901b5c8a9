"""DiffusionNFT (arXiv 2509.16117): contrast on the forward process, no log-probabilities, no trajectories.

For a clean latent x0 with advantage A and any x_t = (1 - t) x0 + t eps:
r = clip(A, +-c) / (2c) + 1/2, v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, x0^+- = x_t -
t v+-, L+- = mean (x0^+- - x0)^2 / w+-, w+- = stop-grad mean |x0^+- - x0| (at least 1e-5), L = c [r L+ /
beta + (1 - r) L- / beta] + kl mean (v - v_base)^2, with c = 5 the advantage clip (the public code's
scale, so that its KL weights carry over). Roll-outs come from the old weights, which follow the trained ones:
old <- d old + (1 - d) theta, d = min(rate * max(iteration - delay, 0), max). The public code has two schedules: rate
0.001 to 0.5, and for OCR none for 75 iterations, then rate 0.0075 to 0.999.
"""

from __future__ import annotations

from torch import Tensor

from spotlight.config import AlgorithmConfig
from spotlight.rl.algorithms import Points, mean_square
from spotlight.rl.sampler import Sampler

LEAST_WEIGHT = 1e-5


class DiffusionNFT:
    """Needs only (seed, clean latent, reward) of a sample; any solver may have made it."""

    needs_trajectory = False
    needs_noise = False
    needs_old = True
    samples_from_old = True

    def __init__(self, config: AlgorithmConfig, sampler: Sampler) -> None:
        self._beta = config.nft_beta
        self._scale = config.advantage_clip
        self._kl = config.kl
        self._decay_rate = config.nft_old_decay_rate
        self._decay_delay = config.nft_old_decay_delay
        self._decay_max = config.nft_old_decay_max
        self.needs_base = config.kl > 0

    def old_decay(self, iteration: int) -> float:
        """The old weights lag more as training goes on, from `delay` on."""
        return min(self._decay_rate * max(iteration - self._decay_delay, 0), self._decay_max)

    def loss(
        self, points: Points, v: Tensor, *, old: Tensor | None = None, base: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of every point, (B,)."""
        assert old is not None
        beta, scale = self._beta, self._scale
        r = points.advantage.clamp(-scale, scale) / (2 * scale) + 0.5
        positive = _weighted_error(points, beta * v + (1 - beta) * old)
        negative = _weighted_error(points, (1 + beta) * old - beta * v)
        loss = scale * (r * positive + (1 - r) * negative) / beta
        metrics = {"old_distance": mean_square(v.detach() - old)}
        if base is None:
            return loss, metrics
        distance = mean_square(v - base)
        return loss + self._kl * distance, metrics | {"kl": distance.detach()}


def _weighted_error(points: Points, v: Tensor) -> Tensor:
    t = points.t.view(-1, *[1] * (v.dim() - 1))
    error = points.x - t * v - points.clean
    weight = error.detach().abs().flatten(1).mean(1).clamp(min=LEAST_WEIGHT)
    return mean_square(error) / weight
