"""Qwen-Image (arXiv 2508.02324): packed latents, a vision-language model as text encoder.

Checked against diffusers' pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from spotlight.config import ModelConfig
from spotlight.rl.models import Conditioning, dtype_of
from spotlight.rl.models.pipeline import PipelineAdapter, pack, rounded, unpack

UNCONDITIONAL = " "  # the model's own documentation asks for a blank, not for nothing


class QwenImageAdapter(PipelineAdapter):
    """Texts of different lengths share a batch under a mask: equal to each alone up to rounding."""

    name = "qwen_image"
    default_path = "Qwen/Qwen-Image"
    pipeline = QwenImagePipeline
    transformer_class = QwenImageTransformer2DModel
    vae_class = AutoencoderKLQwenImage
    text_parts: ClassVar[Mapping[str, Any]] = {
        "tokenizer": Qwen2Tokenizer,
        "text_encoder": Qwen2_5_VLForConditionalGeneration,
    }
    default_tokens = 1024
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )

    @property
    def vae_scale(self) -> int:
        """Image pixels per latent pixel, each way."""
        return 2 ** len(self._vae.config.temperal_downsample)

    def forward(self, latents: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """See `PipelineAdapter.forward`."""
        dtype = dtype_of(self.transformer)
        batch, _, height, width = latents.shape
        embeds, mask = _trimmed(cond["embeds"], cond["mask"])
        tokens = self.transformer(
            hidden_states=pack(latents).to(dtype),
            encoder_hidden_states=embeds.to(dtype),
            encoder_hidden_states_mask=mask,
            timestep=rounded(t, dtype),
            img_shapes=[[(1, height // 2, width // 2)]] * batch,
            return_dict=False,
        )[0]
        return unpack(tokens.float(), height, width)

    def guide(self, v: Tensor, without: Tensor, cfg: float) -> Tensor:
        """Guidance that keeps every token's norm at that of `v`, as the pipeline does."""
        height, width = v.shape[-2:]
        plain, guided = pack(v), pack(super().guide(v, without, cfg))
        scale = plain.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack(guided * scale, height, width)

    def decode_raw(self, latents: Tensor) -> Tensor:
        """An image is a video of one frame; the VAE's latents are normalised per channel."""
        config = self._vae.config
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return self._vae.decode((latents * std + mean).unsqueeze(2), return_dict=False)[0][:, :, 0]

    def embed(self, pipe: Any, prompt: str, **common: Any) -> Mapping[str, Tensor]:
        """`embeds` (tokens, dim) and `mask` (tokens,), True where there is a token."""
        embeds, _ = pipe.encode_prompt(prompt or UNCONDITIONAL, **common)
        return {"embeds": embeds[0], "mask": torch.ones(embeds.shape[1], dtype=torch.bool)}


def _trimmed(embeds: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Without padding that no row of the batch needs; no mask at all where there is none left."""
    lengths = mask.sum(dim=1)
    longest = int(lengths.max())
    embeds, mask = embeds[:, :longest], mask[:, :longest]
    return embeds, None if int(lengths.min()) == longest else mask


def load(config: ModelConfig) -> QwenImageAdapter:
    """From `config.path`, a folder or hub id in diffusers' layout."""
    return QwenImageAdapter(config)
