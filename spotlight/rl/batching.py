"""Model calls whose results do not depend on which other samples share the batch.

A matrix product of one, two or three rows may take another code path than a larger one and differ in the last
bits. On Intel's CPUs a mode of MKL prevents that (`spotlight/_mkl.py`); on others small batches are filled up with
copies of their last row (measured on the tiny transformer in fp32: batches of 4 to 256 give bit-equal rows, 1 to
3 do not). Roll-out, resume after a preemption and training all call the model through here: a sample then has the
same bits however it was batched, and the ratio at the first update is exactly 1.

On a GPU no such size is promised; results there agree to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spotlight.rl.models import Conditioning, ModelAdapter

MIN_ROWS = 4  # smallest batch on the CPU whose rows are bit-equal to those of any larger one


def device_of(adapter: ModelAdapter) -> torch.device:
    """Where the transformer lives."""
    return next(adapter.transformer.parameters()).device


def velocity(
    adapter: ModelAdapter,
    latents: Tensor,
    t: Tensor,
    cond: Conditioning,
    *,
    negative: Conditioning | None = None,
    cfg: float = 1.0,
) -> Tensor:
    """`adapter.velocity` on the transformer's device, with small batches filled up."""
    device = device_of(adapter)
    rows = len(latents)
    filled = _fill(rows, device)
    if len(filled) > rows:
        latents, t, cond = latents[filled], t[filled], cond.index(filled)
        negative = None if negative is None else negative.index(filled)
    v = adapter.velocity(
        latents.to(device),
        t.to(device),
        cond.to(device),
        negative=None if negative is None else negative.to(device),
        cfg=cfg,
    )
    return v[:rows]


def encode(adapter: ModelAdapter, prompts: Sequence[str]) -> Conditioning:
    """`adapter.encode` of each prompt, every distinct text once, in a batch that is large enough."""
    distinct = list(dict.fromkeys(prompts))
    filled = [distinct[row] for row in _fill(len(distinct), torch.device("cpu"))]
    place = {text: row for row, text in enumerate(distinct)}
    return adapter.encode(filled).index([place[text] for text in prompts])


def decode(adapter: ModelAdapter, latents: Tensor) -> Tensor:
    """`adapter.decode` with small batches filled up; (B, C, H, W) in [0, 1]."""
    device = device_of(adapter)
    return adapter.decode(latents[_fill(len(latents), device)].to(device))[: len(latents)]


def _fill(rows: int, device: torch.device) -> list[int]:
    least = MIN_ROWS if device.type == "cpu" else 1
    return [min(row, rows - 1) for row in range(max(rows, least))]
