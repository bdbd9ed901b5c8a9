"""Sets of trainable weights: prepare a transformer for one, take it out, put another in.

The trained, the old, the averaged and the base weights are such sets, dicts of parameter name to tensor, so
full fine-tuning and LoRA share every line that trains, publishes, admits or exports them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from spotlight.config import TrainConfig
from spotlight.errors import ConfigError, IntegrityError
from spotlight.rl import lora
from spotlight.rl.models import ModelAdapter

Weights = dict[str, Tensor]


def prepare(adapter: ModelAdapter, config: TrainConfig, *, seed: int = 0) -> int:
    """Make the transformer ready for `config.mode`; trainers and roll-out workers call it once.

    Returns the number of trainable elements. In LoRA mode it starts equal to the base (B = 0), its A drawn
    from `seed`. Raises ConfigError when no module matches the adapter's LoRA targets, and for full fine-tuning
    of half-precision weights, in which small steps round to nothing.
    """
    transformer = adapter.transformer
    half = next((p.dtype for p in transformer.parameters() if p.dtype != torch.float32), None)
    if config.mode == "full" and half is not None:
        raise ConfigError(
            f"train.mode=full needs fp32 weights, not {half}, in which small steps round to nothing",
            hint="set model.dtype=fp32, or train.mode=lora, whose adapter is fp32 on a base of any precision",
        )
    transformer.eval()  # no dropout anywhere: roll-out and training must agree
    transformer.requires_grad_(config.mode == "full")
    if config.mode == "lora":
        lora.attach(transformer, adapter.lora_targets, config.lora_rank, config.lora_alpha, seed=seed)
    return sum(parameter.numel() for parameter in trainable_parameters(transformer).values())


def trainable_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The live parameters that are trained, by name."""
    return {name: p for name, p in transformer.named_parameters() if p.requires_grad}


def snapshot(transformer: nn.Module) -> Weights:
    """A copy of the trainable weights, on their device."""
    return {name: p.detach().clone() for name, p in trainable_parameters(transformer).items()}


@torch.no_grad()
def bind(transformer: nn.Module, weights: Mapping[str, Tensor]) -> int:
    """Copy `weights` into the transformer; every trainable parameter exactly once.

    Returns how many tensors were bound. Raises IntegrityError, before anything is changed, when a name is
    missing or unknown or a shape differs.
    """
    parameters = trainable_parameters(transformer)
    problems = [f"{name} is missing" for name in sorted(parameters.keys() - weights.keys())]
    problems += [f"{name} is unknown" for name in sorted(weights.keys() - parameters.keys())]
    problems += [
        f"{name} is {tuple(weights[name].shape)}, not {tuple(p.shape)}"
        for name, p in parameters.items()
        if name in weights and weights[name].shape != p.shape
    ]
    if problems:
        raise IntegrityError(
            f"{len(problems)} of {len(parameters)} weights do not fit the model: {'; '.join(problems[:3])}"
        )
    for name, parameter in parameters.items():
        parameter.copy_(placed(weights[name], parameter))
    return len(parameters)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is sharded over processes, which must all call this; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_cpu(weights: Mapping[str, Tensor], *, keep: bool = True) -> Weights:
    """fp32 copies of whole tensors, one after the other. A process with `keep` False only hands over its shards."""
    copies = {}
    for name, tensor in weights.items():
        full = whole(tensor.detach())
        if keep:
            copies[name] = full.to("cpu", torch.float32, copy=True)
    return copies


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor where `like` lies and sharded as `like` is; every process has it, none is asked."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    local = tensor.to(like.to_local().device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


@contextmanager
def bound(transformer: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """`weights` in the transformer for a while. Not between a forward with gradient and its backward."""
    live = snapshot(transformer)
    bind(transformer, weights)
    try:
        yield
    finally:
        bind(transformer, live)
