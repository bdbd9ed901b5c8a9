"""Tiny random checkpoints of the reward models' real classes, saved by those classes."""

from __future__ import annotations

from pathlib import Path

import torch
from fakes.tiny_pipelines import CLIP_TOKENS, clip_text_config, clip_tokenizer, qwen_tokenizer
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    DeepseekOcr2Config,
    DeepseekOcr2ForConditionalGeneration,
    DeepseekOcr2Processor,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    SwinConfig,
)
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil


def save_clip(folder: Path, *, seed: int = 0) -> Path:
    """A CLIP over 32x32 pixels."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vision = CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
        )
        text = clip_text_config(16, 8)
        model = CLIPModel(
            CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
        )
    model.save_pretrained(str(folder))
    size = {"height": 32, "width": 32}
    CLIPProcessor(
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size), clip_tokenizer(CLIP_TOKENS)
    ).save_pretrained(str(folder))
    return folder


def save_detector(folder: Path, labels: dict[int, str]) -> Path:
    """A Mask2Former over 64x64 pixels with ten queries."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = SwinConfig(
            image_size=64,
            patch_size=4,
            embed_dim=8,
            depths=[1, 1, 1, 1],
            num_heads=[1, 1, 2, 2],
            window_size=4,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )
        model = Mask2FormerForUniversalSegmentation(
            Mask2FormerConfig(
                backbone_config=backbone,
                feature_size=32,  # the pixel decoder's group norms have 32 groups
                mask_feature_size=32,
                hidden_dim=32,
                encoder_feedforward_dim=16,
                encoder_layers=1,
                decoder_layers=2,
                num_attention_heads=2,
                dim_feedforward=16,
                num_queries=10,
                id2label=labels,
                label2id={label: i for i, label in labels.items()},
            )
        )
    model.save_pretrained(str(folder))
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(str(folder))
    return folder


def save_reader(folder: Path) -> Path:
    """A DeepSeek-OCR-2 that reads byte by byte."""
    torch.set_num_threads(1)
    tokenizer = qwen_tokenizer(("<image>", "<|pad|>"))
    tokenizer.pad_token = "<|pad|>"
    common = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {
        "sam_config": {
            "hidden_size": 16,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 768,
            "window_size": 4,
            "global_attn_indexes": [1],
            "downsample_channels": [16, 16],
        },
        "encoder_config": {**common, "vocab_size": 8, "num_hidden_layers": 1},
    }
    text = {
        **common,
        "vocab_size": 300,
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    image = tokenizer.convert_tokens_to_ids("<image>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DeepseekOcr2ForConditionalGeneration(
            DeepseekOcr2Config(vision_config=vision, text_config=text, image_token_id=image)
        )
    model.save_pretrained(str(folder))
    images = DeepseekOcr2ImageProcessorPil(size={"height": 768, "width": 768}, tile_size=768)
    DeepseekOcr2Processor(images, tokenizer).save_pretrained(str(folder))
    return folder
