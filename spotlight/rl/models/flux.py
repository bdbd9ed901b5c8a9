"""FLUX.1: a guidance-distilled transformer over packed latents; checked against diffusers' pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from spotlight.config import ModelConfig
from spotlight.rl.models import Conditioning, dtype_of
from spotlight.rl.models.pipeline import PipelineAdapter, pack, rounded, unpack


class FluxAdapter(PipelineAdapter):
    """CLIP's pooled vector and T5 (`model.text_tokens`, 512).

    `model.guidance` is the scale that FLUX.1-dev was distilled on and takes as an input. `sampler.cfg` is true
    classifier-free guidance on top, with a second forward; leave it at 1 for the published behaviour.
    """

    name = "flux"
    default_path = "black-forest-labs/FLUX.1-dev"
    pipeline = FluxPipeline
    transformer_class = FluxTransformer2DModel
    vae_class = AutoencoderKL
    text_parts: ClassVar[Mapping[str, Any]] = {
        "tokenizer": CLIPTokenizer,
        "tokenizer_2": T5TokenizerFast,
        "text_encoder": CLIPTextModel,
        "text_encoder_2": T5EncoderModel,
    }
    default_tokens = 512
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )

    def forward(self, latents: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """See `PipelineAdapter.forward`."""
        dtype, where = dtype_of(self.transformer), latents.device
        batch, _, height, width = latents.shape
        guided = self.transformer.config.guidance_embeds
        tokens = self.transformer(
            hidden_states=pack(latents).to(dtype),
            encoder_hidden_states=cond["embeds"].to(dtype),
            pooled_projections=cond["pooled"].to(dtype),
            timestep=rounded(t, dtype),
            guidance=torch.full((batch,), self._config.guidance, device=where) if guided else None,
            txt_ids=torch.zeros(cond["embeds"].shape[1], 3, device=where),
            img_ids=_positions(height // 2, width // 2, where),
            return_dict=False,
        )[0]
        return unpack(tokens.float(), height, width)

    def embed(self, pipe: Any, prompt: str, **common: Any) -> Mapping[str, Tensor]:
        """`embeds` (tokens, dim) and `pooled` (dim,)."""
        embeds, pooled, _ = pipe.encode_prompt(prompt, **common)
        return {"embeds": embeds[0], "pooled": pooled[0]}


def _positions(height: int, width: int, where: torch.device) -> Tensor:
    """(height width, 3): 0, row and column of every token."""
    rows, columns = torch.arange(height, device=where), torch.arange(width, device=where)
    return torch.cartesian_prod(rows[:1] * 0, rows, columns).float()


def load(config: ModelConfig) -> FluxAdapter:
    """From `config.path`, a folder or hub id in diffusers' layout."""
    return FluxAdapter(config)
