"""Diffusion transformers behind one protocol. One more model is one more file with a `load(config)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from spotlight.config import ModelConfig
from spotlight.errors import ConfigError
from spotlight.rl.registry import MODELS, resolve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What the text side gives the transformer: named tensors whose dim 0 is the prompt."""

    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if len({len(tensor) for tensor in self.tensors.values()}) != 1:
            shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
            raise ValueError(f"conditioning tensors need one common first dimension, got {shapes}")

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def size(self) -> int:
        """Number of prompts."""
        return len(next(iter(self.tensors.values())))

    def index(self, rows: Sequence[int] | Tensor) -> Conditioning:
        """The prompts at `rows`, in that order; a row may come up several times."""
        chosen = torch.as_tensor(rows, dtype=torch.long)
        return Conditioning({name: tensor[chosen.to(tensor.device)] for name, tensor in self.tensors.items()})

    def repeat(self, times: int) -> Conditioning:
        """Each prompt `times` times in a row: a a b b, as a group's samples lie."""
        return Conditioning(
            {name: tensor.repeat_interleave(times, dim=0) for name, tensor in self.tensors.items()}
        )

    def to(self, target: torch.device | torch.dtype | str) -> Conditioning:
        """On another device, or with the floating point tensors (masks stay) in another dtype."""
        cast = isinstance(target, torch.dtype)
        return Conditioning(
            {
                name: tensor if cast and not tensor.is_floating_point() else tensor.to(target)
                for name, tensor in self.tensors.items()
            }
        )

    @staticmethod
    def cat(parts: Iterable[Conditioning]) -> Conditioning:
        """One after the other. Shorter sequences are padded with zeros, which a mask reads as False."""
        parts = list(parts)
        if len({frozenset(part.tensors) for part in parts}) != 1:
            raise ValueError("only conditionings with the same tensor names can be joined")
        return Conditioning({name: _cat_padded([part[name] for part in parts]) for name in parts[0].tensors})


def _cat_padded(tensors: list[Tensor]) -> Tensor:
    longest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_zeros((sum(map(len, tensors)), *longest))
    start = 0
    for tensor in tensors:
        joined[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
        start += len(tensor)
    return joined


@runtime_checkable
class ModelAdapter(Protocol):
    """A model as the RL code sees it: rectified flow with x_t = (1 - t) x0 + t eps."""

    name: str
    base_id: str  # "blake2b:<hex>" over the base weights; two runs with one base share it
    transformer: nn.Module  # the module that is trained, diffusers' own class
    lora_targets: tuple[str, ...]

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latent, without the batch dimension, for an image in pixels."""
        ...

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Text side, frozen and without gradient; the empty string is the unconditional prompt.

        Raises DataError for a prompt that the model cannot take.
        """
        ...

    def velocity(
        self,
        latents: Tensor,
        t: Tensor,
        cond: Conditioning,
        *,
        negative: Conditioning | None = None,
        cfg: float = 1.0,
    ) -> Tensor:
        """v = eps - x0 in fp32, shaped like `latents` (B, *latent_shape); t is (B,) in [0, 1].

        With `negative` and cfg != 1: v_neg + cfg (v - v_neg).
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """(B, 3 or 1, H, W) in [0, 1]."""
        ...


def dtype_of(module: nn.Module) -> torch.dtype:
    """The precision of its first parameter, a base one where there is an adapter.

    diffusers' own property asks every module for hooks first: a tenth of a tiny model's forward.
    """
    return next(module.parameters()).dtype


def configure(transformer: nn.Module, config: ModelConfig) -> None:
    """Apply what every diffusers transformer can do: attention backend, checkpointing, compilation."""
    if config.attention_backend:
        try:
            transformer.set_attention_backend(config.attention_backend)
        except (ValueError, RuntimeError, ImportError) as error:
            raise ConfigError(f"model.attention_backend {config.attention_backend!r}: {error}") from error
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if config.compile:  # block by block; SD3 has no `_repeated_blocks`, without which diffusers refuses
        repeated = getattr(transformer, "_repeated_blocks", None) or transformer._no_split_modules
        for module in transformer.modules():
            if type(module).__name__ in repeated:
                module.compile()


def load_model(config: ModelConfig) -> ModelAdapter:
    """Load the adapter named by `config.kind`. Raises ConfigError, NotFoundError or IntegrityError."""
    adapter: ModelAdapter = resolve(config.kind, MODELS, "model.kind")(config)
    return adapter
