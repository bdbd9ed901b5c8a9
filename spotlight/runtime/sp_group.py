"""An explorer with several GPUs: one rank per GPU, forked from a zygote, behind the usual adapter.

The worker above does not know: a forward that loses a rank takes longer, and goes on with those that are left.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Mapping
from typing import Any

import torch

from spotlight.core.regroup import Limits
from spotlight.core.types import Gpu
from spotlight.errors import ConfigError
from spotlight.rl.models import ModelAdapter
from spotlight.runtime.gang import Gang, GangAdapter
from spotlight.runtime.place import Place
from spotlight.runtime.worker import AdmitWeights
from spotlight.runtime.zygote import Zygote


def form(
    place: Place, inner: ModelAdapter, *, name: str, node: str, gpus: int
) -> tuple[ModelAdapter, AdmitWeights]:
    """Start the ranks and form the group. Raises ConfigError for a degree that cannot work, with the reason."""
    model, degree = place.config.model, place.config.cluster.sp_degree
    rows = image_rows(inner, model.height, model.width)
    limits = Limits(heads=inner.transformer.config["num_attention_heads"], max_degree=gpus)
    if degree and (why := limits.refusal(degree, rows)):
        raise ConfigError(f"cluster.sp_degree {degree}: {why}", hint="lower it, or 0 for what is useful")
    zygote = Zygote("spotlight.runtime.sp_group:load_rank", place.tell())
    atexit.register(zygote.close)
    zygote.wait_ready()
    gang = Gang(name, {node: zygote}, limits, rows, degree=degree or None)
    atexit.register(gang.close)
    everyone = [Gpu(node, index) for index in range(gpus)]
    gang.add(everyone, _device)
    gang.wait_ready()
    published = place.weights()

    def admit(version: int) -> tuple[str, int]:
        gang.add(set(everyone) - set(gang.live), _device)  # those that were lost come back between roll-outs
        tensors = published.fetch(version, base=inner.base_id)
        return gang.bind(tensors), len(tensors)

    return GangAdapter(inner, gang), admit


def load_rank(told: Mapping[str, Any]) -> ModelAdapter:
    """The zygote's factory: the base model as every worker of the run prepares it."""
    return Place.of(told).load()


def image_rows(adapter: ModelAdapter, height: int, width: int) -> int:
    """Image tokens of one sample: packed latents are (tokens, channels), others (channels, h, w)."""
    shape = adapter.latent_shape(height, width)
    if len(shape) == 2:
        return shape[0]
    patch = int(adapter.transformer.config.get("patch_size") or 1)
    return math.prod(size // patch for size in shape[-2:])


def _device(gpu: Gpu) -> str:
    return f"cuda:{gpu.index}" if torch.cuda.is_available() else "cpu"
