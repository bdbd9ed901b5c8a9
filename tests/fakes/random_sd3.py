"""A tiny random transformer of a real diffusers class behind the adapter protocol: no training, no files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from spotlight.rl.models import Conditioning


class RandomSD3:
    """Every parameter random (diffusers zeroes some, which would hide errors), grey pixels as latents."""

    name = "random-sd3"
    base_id = "random"
    lora_targets = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )

    def __init__(self, *, layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        torch.set_num_threads(1)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.transformer = SD3Transformer2DModel(
                sample_size=32,
                patch_size=4,
                in_channels=1,
                out_channels=1,
                num_layers=layers,
                attention_head_dim=24,
                num_attention_heads=4,
                joint_attention_dim=32,
                caption_projection_dim=96,
                pooled_projection_dim=32,
                pos_embed_max_size=8,
                qk_norm="rms_norm",
            )
            for parameter in self.transformer.parameters():
                if parameter.dim() > 1 or not parameter.any():
                    torch.nn.init.normal_(parameter, std=0.05)
            self.transformer = self.transformer if dtype == torch.float32 else self.transformer.to(dtype)
            self._letters = torch.randn(256, 32)
            self._pool = torch.randn(4 * 32, 32) / 8

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (1, height, width)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        codes = torch.tensor([list(prompt.encode().ljust(4, b"\0")[:4]) for prompt in prompts])
        tokens = self._letters[codes]
        return Conditioning({"tokens": tokens, "pooled": tokens.flatten(1) @ self._pool})

    def velocity(
        self,
        latents: Tensor,
        t: Tensor,
        cond: Conditioning,
        *,
        negative: Conditioning | None = None,
        cfg: float = 1.0,
    ) -> Tensor:
        v = self._forward(latents, t, cond)
        if negative is None or cfg == 1:
            return v
        v_negative = self._forward(latents, t, negative)
        return v_negative + cfg * (v - v_negative)

    def decode(self, latents: Tensor) -> Tensor:
        return (latents / 2 + 0.5).clamp(0, 1)

    def _forward(self, latents: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        dtype = self.transformer.dtype
        cond = cond.to(dtype)
        return self.transformer(
            hidden_states=latents.to(dtype),
            encoder_hidden_states=cond["tokens"],
            pooled_projections=cond["pooled"],
            timestep=t * 1000,
            return_dict=False,
        )[0].float()
