"""What the adapters of diffusers' pipelines share: loading, prompt embeddings, guidance, decoding.

A latent is what the VAE decodes, (channels, height / 8, width / 8); models that take packed patches pack
inside `velocity`. So noise, states and samples look alike for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from spotlight.config import ModelConfig
from spotlight.errors import ConfigError
from spotlight.rl import hub
from spotlight.rl.models import DTYPES, Conditioning, configure
from spotlight.rl.models.prompts import Embed, PromptEncoder


class PipelineAdapter(ABC):
    """See `ModelAdapter`. A subclass names its classes and says how one forward is called.

    The VAE works in fp32 whatever `model.dtype` is: SD3's overflows in fp16, and rewards read fine detail.
    """

    name: ClassVar[str]
    lora_targets: ClassVar[tuple[str, ...]]
    default_path: ClassVar[str]
    pipeline: ClassVar[Any]  # diffusers' class; only its `encode_prompt` is used
    transformer_class: ClassVar[Any]
    vae_class: ClassVar[Any]
    text_parts: ClassVar[Mapping[str, Any]]  # subfolder -> class of a tokenizer or a text encoder
    default_tokens: ClassVar[int]  # longest prompt, in tokens, as the pipeline has it
    patch = 2  # latent pixels of one token, each way

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._path = config.path or self.default_path
        folder = hub.locate(self._path, config.revision, ("transformer", "vae"))
        self.base_id = hub.identity(folder, ("transformer", "vae"))
        self.transformer = hub.load(self.transformer_class, folder / "transformer", DTYPES[config.dtype])
        self.transformer.to(hub.transformer_device())
        configure(self.transformer, config)
        self._vae = hub.load(self.vae_class, folder / "vae", torch.float32).to(hub.device())
        self._vae.enable_slicing()  # image by image: less memory, and no dependence on the batch
        if config.vae_tiling:
            self._vae.enable_tiling()
        cache = Path(config.embedding_cache).expanduser() if config.embedding_cache else None
        self.encode = PromptEncoder(self._load_text_side, self._text_key, cache)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """(channels, height / scale, width / scale). Raises ConfigError for a size that is not whole tokens."""
        unit = self.vae_scale * self.patch
        if height % unit or width % unit:
            raise ConfigError(
                f"{self.name} cannot draw {height}x{width} pixels",
                hint=f"model.height and model.width: multiples of {unit}",
            )
        return (self.channels, height // self.vae_scale, width // self.vae_scale)

    def velocity(
        self,
        latents: Tensor,
        t: Tensor,
        cond: Conditioning,
        *,
        negative: Conditioning | None = None,
        cfg: float = 1.0,
    ) -> Tensor:
        """See `ModelAdapter.velocity`. Both halves of the guidance share a forward if their texts are as long."""
        with torch.autocast(latents.device.type, torch.bfloat16, enabled=self._config.autocast):
            return self._velocity(latents, t, cond, negative, cfg)

    def _velocity(
        self, latents: Tensor, t: Tensor, cond: Conditioning, negative: Conditioning | None, cfg: float
    ) -> Tensor:
        if negative is None or cfg == 1:
            return self.forward(latents, t, cond)
        if _shapes(negative) == _shapes(cond):
            twice = Conditioning.cat([negative, cond])
            without, v = self.forward(torch.cat([latents] * 2), torch.cat([t] * 2), twice).chunk(2)
        else:
            without, v = self.forward(latents, t, negative), self.forward(latents, t, cond)
        return self.guide(v, without, cfg)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1]."""
        where = self._vae.device  # the transformer may be elsewhere: on the ranks of a group, sharded
        return (self.decode_raw(latents.to(where, torch.float32)) / 2 + 0.5).clamp(0, 1)

    @property
    def channels(self) -> int:
        """Of a latent."""
        return self.transformer.config.in_channels // self.patch**2

    @property
    def vae_scale(self) -> int:
        """Image pixels per latent pixel, each way."""
        return 2 ** (len(self._vae.config.block_out_channels) - 1)

    def guide(self, v: Tensor, without: Tensor, cfg: float) -> Tensor:
        """Classifier-free guidance from the velocities with and without the prompt."""
        return without + cfg * (v - without)

    def decode_raw(self, latents: Tensor) -> Tensor:
        """Pixels in [-1, 1] of fp32 latents."""
        config = self._vae.config
        return self._vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]

    @abstractmethod
    def forward(self, latents: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """One call of the transformer: the velocity in fp32, shaped like `latents`."""

    @abstractmethod
    def embed(self, pipe: Any, prompt: str, **common: Any) -> Mapping[str, Tensor]:
        """One prompt's tensors by `pipe.encode_prompt`, without a batch dimension."""

    def used_text_parts(self) -> Mapping[str, Any]:
        """Those of `text_parts` that a prompt goes through."""
        return self.text_parts

    def _load_text_side(self) -> Embed:
        config, used = self._config, self.used_text_parts()
        folder = hub.locate(self._path, config.revision, tuple(used))
        where = torch.device("cpu") if config.offload_text_encoder else hub.device()
        parts: dict[str, Any] = dict.fromkeys(self.text_parts)
        for name, kind in used.items():
            if name.startswith("tokenizer"):
                parts[name] = hub.load_tokenizer(kind, folder / name)
            else:
                parts[name] = hub.load(kind, folder / name, DTYPES[config.dtype]).to(where)
        pipe = self.pipeline(transformer=self.transformer, vae=None, scheduler=None, **parts)
        common = {"device": where, "max_sequence_length": self._tokens}
        return lambda prompt: self.embed(pipe, prompt, **common)

    @property
    def _tokens(self) -> int:
        return self._config.text_tokens or self.default_tokens

    def _text_key(self) -> str:
        """What a prompt's embedding depends on besides the prompt. Only names the encoders, reads no weights."""
        folder = hub.locate(self._path, self._config.revision, ())
        encoders = [part for part in self.used_text_parts() if part.startswith("text_encoder")]
        at = folder.name if folder.parent.name == "snapshots" else hub.identity(folder, encoders)
        return f"{self.name} {at} {len(encoders)} {self._config.dtype} {self._tokens}"


def pack(latents: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H/2 W/2, 4 C): tokens of 2 x 2 pixels, row by row, channels outermost."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Inverse of `pack` for latents of `height` x `width`."""
    b, _, c = tokens.shape
    return (
        tokens.view(b, height // 2, width // 2, c // 4, 2, 2)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(b, c // 4, height, width)
    )


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t as the Flux and Qwen pipelines hand it over: thousandths in the model's precision."""
    return (t * 1000).to(dtype) / 1000


def _shapes(cond: Conditioning) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in cond.tensors.items()}
