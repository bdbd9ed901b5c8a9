"""An exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spotlight.rl.params import Weights


@torch.no_grad()
def follow(average: Weights, weights: Mapping[str, Tensor], decay: float) -> None:
    """average <- decay average + (1 - decay) weights, in place and in the average's own (fp32) precision."""
    for name, tensor in average.items():
        if decay == 0:  # exactly, not to rounding
            tensor.copy_(weights[name])
        else:
            tensor.lerp_(weights[name].to(tensor), 1 - decay)
