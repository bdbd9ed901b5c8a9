"""Stable Diffusion 3 and 3.5 (medium, large): arXiv 2403.03206; checked against diffusers' pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from spotlight.config import ModelConfig
from spotlight.errors import ConfigError
from spotlight.rl import hub
from spotlight.rl.models import Conditioning, dtype_of
from spotlight.rl.models.pipeline import PipelineAdapter


class SD3Adapter(PipelineAdapter):
    """Two CLIP encoders (77 tokens) and T5 (`model.text_tokens`, 256) side by side.

    A checkpoint saved without T5, or `model.t5=false`, has zeros in its place, as the pipeline does.
    """

    name = "sd3"
    default_path = "stabilityai/stable-diffusion-3.5-medium"
    pipeline = StableDiffusion3Pipeline
    transformer_class = SD3Transformer2DModel
    vae_class = AutoencoderKL
    text_parts: ClassVar[Mapping[str, Any]] = {
        "tokenizer": CLIPTokenizer,
        "tokenizer_2": CLIPTokenizer,
        "tokenizer_3": T5TokenizerFast,
        "text_encoder": CLIPTextModelWithProjection,
        "text_encoder_2": CLIPTextModelWithProjection,
        "text_encoder_3": T5EncoderModel,
    }
    default_tokens = 256
    # "attn." leaves out attn2, 3.5-medium's second attention over the image, as published recipes do
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )

    def used_text_parts(self) -> Mapping[str, Any]:
        """See `PipelineAdapter.used_text_parts`; `model_index.json` says null for an encoder that was left out."""
        index = hub.locate(self._path, self._config.revision, ()) / "model_index.json"
        kind = (
            json.loads(index.read_text()).get("text_encoder_3", [None])[0] if index.is_file() else "unknown"
        )
        if self._config.t5 and kind is not None:
            return self.text_parts
        return {name: part for name, part in self.text_parts.items() if not name.endswith("_3")}

    @property
    def channels(self) -> int:
        """Of a latent; the transformer cuts patches itself."""
        return self.transformer.config.in_channels

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """See `PipelineAdapter.latent_shape`; the position table bounds the size as well."""
        largest = self.transformer.config.pos_embed_max_size * self.patch * self.vae_scale
        if max(height, width) > largest:
            raise ConfigError(f"{self.name} cannot draw {height}x{width} pixels", hint=f"at most {largest}")
        return super().latent_shape(height, width)

    def forward(self, latents: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """See `PipelineAdapter.forward`."""
        dtype = dtype_of(self.transformer)
        return self.transformer(
            hidden_states=latents.to(dtype),
            encoder_hidden_states=cond["embeds"].to(dtype),
            pooled_projections=cond["pooled"].to(dtype),
            timestep=t * 1000,
            return_dict=False,
        )[0].float()

    def embed(self, pipe: Any, prompt: str, **common: Any) -> Mapping[str, Tensor]:
        """`embeds` (77 + tokens, dim) and `pooled` (dim,)."""
        embeds, _, pooled, _ = pipe.encode_prompt(
            prompt, prompt, prompt, do_classifier_free_guidance=False, **common
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}


def load(config: ModelConfig) -> SD3Adapter:
    """From `config.path`, a folder or hub id in diffusers' layout."""
    return SD3Adapter(config)
