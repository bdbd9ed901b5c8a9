"""The clipped policy-gradient objective that the ratio-based algorithms share."""

from __future__ import annotations

import torch
from torch import Tensor

from spotlight.rl.algorithms import RATIO_DEVIATION


def clipped_objective(log_ratio: Tensor, advantage: Tensor, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A rho, -A clamp(rho, 1 - clip, 1 + clip)) with rho = exp(log_ratio), each (B,), and its metrics.

    PPO's objective (arXiv 1707.06347, eq. 7) as a loss.
    """
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
    deviation = (ratio.detach() - 1).abs()
    return loss, {RATIO_DEVIATION: deviation, "clip_fraction": (deviation > clip).float()}
