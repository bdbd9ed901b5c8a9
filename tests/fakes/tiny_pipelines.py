"""Tiny random checkpoints of the real pipelines, saved by the real classes: one or two layers.

Every parameter is random and large enough to matter: as initialised, some are zero and prompts hardly differ.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

KINDS = ("sd3", "flux", "qwen_image")
BYTES = sorted(ByteLevel.alphabet())
CLIP_TOKENS = 16


def build(kind: str, **transformer: Any) -> DiffusionPipeline:
    """A pipeline of `kind`, the same at every call; `transformer` overrides its configuration."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        pipe = {"sd3": _sd3, "flux": _flux, "qwen_image": _qwen}[kind](transformer)
        for module in pipe.components.values():
            if isinstance(module, nn.Module):
                _randomise(module.eval().requires_grad_(False))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save(kind: str, folder: Path, **transformer: Any) -> Path:
    """The checkpoint on disk, in diffusers' layout."""
    build(kind, **transformer).save_pretrained(str(folder), safe_serialization=True)
    return folder


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Uses the sigmas it is given as they are."""
    return FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)


def clip_tokenizer(length: int = CLIP_TOKENS) -> CLIPTokenizer:
    """Lower-case letters as they are."""
    vocab = {text: i for i, text in enumerate([*BYTES, *(f"{b}</w>" for b in BYTES)])}
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocab[special] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=length)


def clip_text_config(width: int, projection: int) -> CLIPTextConfig:
    """One vocabulary with `clip_tokenizer`."""
    return CLIPTextConfig(
        vocab_size=514,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=projection,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )


def qwen_tokenizer(specials: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Qwen2Tokenizer:
    """Byte by byte."""
    vocab = {text: i for i, text in enumerate([*BYTES, "<|endoftext|>", *specials])}
    return Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=list(specials))


def _t5() -> dict[str, Any]:
    letters = [*string.ascii_letters, *string.digits, *"'\"!?.,-"]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in letters)]
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    return {"tokenizer": T5TokenizerFast(vocab=vocab, extra_ids=0), "encoder": T5EncoderModel(config)}


def _sd3(overrides: dict[str, Any]) -> StableDiffusion3Pipeline:
    t5 = _t5()
    config: dict[str, Any] = {
        "sample_size": 32,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 32,
        "out_channels": 4,
        "pos_embed_max_size": 24,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(**config | overrides),
        scheduler=scheduler(),
        vae=_vae(),
        text_encoder=CLIPTextModelWithProjection(clip_text_config(16, 16)),
        tokenizer=clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_text_config(16, 16)),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5["encoder"],
        tokenizer_3=t5["tokenizer"],
    )


def _flux(overrides: dict[str, Any]) -> FluxPipeline:
    t5 = _t5()
    config: dict[str, Any] = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
        "guidance_embeds": True,
        "axes_dims_rope": (2, 2, 4),
    }
    return FluxPipeline(
        transformer=FluxTransformer2DModel(**config | overrides),
        scheduler=scheduler(),
        vae=_vae(),
        text_encoder=CLIPTextModel(clip_text_config(16, 16)),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5["encoder"],
        tokenizer_2=t5["tokenizer"],
    )


def _qwen(overrides: dict[str, Any]) -> QwenImagePipeline:
    config: dict[str, Any] = {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "axes_dims_rope": (2, 2, 4),
    }
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(**config | overrides),
        scheduler=scheduler(),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, -0.4],
            latents_std=[1.5, 2.0, 0.7, 1.1],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(qwen_vl_config()),
        tokenizer=qwen_tokenizer(),
    )


def qwen_vl_config() -> Qwen2_5_VLConfig:
    """Two text layers, one vision layer."""
    return Qwen2_5_VLConfig(
        text_config={
            "bos_token_id": 0,
            "eos_token_id": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 320,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [0],
        },
    )


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=2,
        layers_per_block=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5,
        shift_factor=0.06,
        sample_size=32,
    )


def _randomise(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dim() > 1 or not parameter.any():
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1)
