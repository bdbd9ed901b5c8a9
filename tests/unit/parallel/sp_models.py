"""Tiny random instances of the real transformer classes, and inputs for them."""

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel


def qwen(heads=4, layers=2, **kw):
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=layers, attention_head_dim=16,
        num_attention_heads=heads, joint_attention_dim=32, axes_dims_rope=(8, 4, 4), **kw,
    ).eval()  # fmt: skip


def qwen_inputs(batch=1, h=8, w=8, text=16, mask=None, seed=1):
    g = torch.Generator().manual_seed(seed)
    return dict(
        hidden_states=torch.randn(batch, h * w, 16, generator=g),
        encoder_hidden_states=torch.randn(batch, text, 32, generator=g),
        encoder_hidden_states_mask=mask,
        timestep=torch.full((batch,), 0.5),
        img_shapes=[[(1, h, w)]] * batch,
        return_dict=False,
    )


def flux(heads=4, **kw):
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=heads, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), **kw,
    ).eval()  # fmt: skip


def flux_inputs(batch=1, h=8, w=8, text=16, seed=1):
    g = torch.Generator().manual_seed(seed)
    ids = torch.zeros(h, w, 3)
    ids[..., 1], ids[..., 2] = torch.arange(h)[:, None], torch.arange(w)[None]
    return dict(
        hidden_states=torch.randn(batch, h * w, 16, generator=g),
        encoder_hidden_states=torch.randn(batch, text, 32, generator=g),
        pooled_projections=torch.randn(batch, 32, generator=g),
        timestep=torch.full((batch,), 0.5),
        img_ids=ids.reshape(-1, 3),
        txt_ids=torch.zeros(text, 3),
        return_dict=False,
    )


def sd3(heads=4, dual=(), qk_norm=None, **kw):
    torch.manual_seed(0)
    defaults = dict(
        sample_size=32, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=16,
        num_attention_heads=heads, joint_attention_dim=32, caption_projection_dim=heads * 16,
        pooled_projection_dim=64, out_channels=4, pos_embed_max_size=32,
        dual_attention_layers=dual, qk_norm=qk_norm,
    )  # fmt: skip
    return SD3Transformer2DModel(**{**defaults, **kw}).eval()


def tiny():
    """The shape of the embedded default: grey 16x32 pixels, patch 4, four text slots."""
    return sd3(
        patch_size=4, in_channels=1, out_channels=1, num_layers=4, attention_head_dim=24,
        caption_projection_dim=96, pooled_projection_dim=32, pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip


def sd3_inputs(batch=1, h=16, w=16, text=16, channels=4, pooled=64, seed=1):
    g = torch.Generator().manual_seed(seed)
    return dict(
        hidden_states=torch.randn(batch, channels, h, w, generator=g),
        encoder_hidden_states=torch.randn(batch, text, 32, generator=g),
        pooled_projections=torch.randn(batch, pooled, generator=g),
        timestep=torch.full((batch,), 500.0),
        return_dict=False,
    )


def tiny_inputs(batch=2):
    return sd3_inputs(batch, h=16, w=32, text=4, channels=1, pooled=32)


def cast(inputs, dtype):
    """Floating tensors to `dtype`, except position ids, which a pipeline keeps exact."""
    return {
        k: v.to(dtype)
        if isinstance(v, torch.Tensor) and v.is_floating_point() and not k.endswith("_ids")
        else v
        for k, v in inputs.items()
    }
