"""Low-rank adapters through peft, and their file layout in diffusers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from peft import LoraConfig
from torch import Tensor, nn

from spotlight.errors import ConfigError, IntegrityError

ADAPTER = "default"  # peft's name inside parameter names; exported files do not carry it


def attach(transformer: nn.Module, targets: Sequence[str], rank: int, alpha: int, *, seed: int) -> None:
    """Add a LoRA to every Linear whose name ends in one of `targets`: B = 0, A drawn from `seed`.

    The adapter is fp32 whatever the base is: steps of 1e-4 vanish in bf16. Raises ConfigError without a
    match.
    """
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            transformer.add_adapter(config, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(f"LoRA finds no layer named like {', '.join(targets)}: {error}") from None
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()


def to_diffusers(weights: Mapping[str, Tensor], rank: int, alpha: int) -> dict[str, Tensor]:
    """Trainable names and tensors as `pytorch_lora_weights.safetensors` has them.

    `transformer.` in front, no adapter name inside. The scale alpha / rank is folded into B: every loader
    then applies the adapter at full strength, also one that reads no alpha.
    """
    scale = alpha / rank
    return {
        "transformer." + name.replace(f".{ADAPTER}.", "."): (
            tensor.detach().float() * scale if re.search(r"\.lora_B\b", name) else tensor.detach().float()
        ).cpu()
        for name, tensor in weights.items()
    }


@torch.no_grad()
def merge(transformer: nn.Module, weights: Mapping[str, Tensor], rank: int, alpha: int) -> None:
    """Add alpha / rank B A to the weights of a base transformer, in fp32, rounded once to their own precision.

    Raises IntegrityError, before anything is changed, for an adapter of a layer that is not there or does not fit.
    """
    layers = dict(transformer.named_modules())
    changes = {}
    for name, up in weights.items():
        layer, found, _ = name.partition(f".lora_B.{ADAPTER}")
        if found:
            down, target = weights.get(name.replace(".lora_B.", ".lora_A.")), layers.get(layer)
            if down is None or target is None or (*up.shape[:1], *down.shape[1:]) != target.weight.shape:
                raise IntegrityError(f"{name} belongs to no layer of this transformer")
            changes[layer] = alpha / rank * (up.float() @ down.float())
    if 2 * len(changes) != len(weights):
        raise IntegrityError(f"{len(weights)} LoRA tensors are not {len(changes)} pairs")
    for layer, change in changes.items():
        weight = layers[layer].weight
        weight.copy_(weight.float() + change.to(weight.device))
