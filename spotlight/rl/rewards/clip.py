"""CLIP score (Hessel et al. 2021, arXiv 2104.08718): the cosine between an image and its prompt.

Not rescaled: CLIPScore's factor 2.5 and its cut at 0 change nothing that a group could learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor

from spotlight.rl import hub
from spotlight.rl.rewards import Metadata, Scores

IMAGES_PER_FORWARD = 32


class ClipScore:
    """`clip`: in [-1, 1], about 0.2 to 0.35 for pictures of what is asked.

    `source` is a folder, a hub id or `id@revision`; a prompt beyond 77 tokens is cut, as CLIP must.
    """

    default_source = "openai/clip-vit-large-patch14"
    default_processor: str | None = None  # for a model whose repository has none

    def __init__(self, source: str = "") -> None:
        folder = located(source or self.default_source)
        own = (folder / "preprocessor_config.json").exists() or (folder / "processor_config.json").exists()
        beside = folder if own or not self.default_processor else located(self.default_processor)
        self._model = hub.load(CLIPModel, folder, torch.float32).to(hub.device())
        self._processor = hub.load_tokenizer(CLIPProcessor, beside)

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """See `Reward.score`."""
        values: list[float | None] = []
        for start in range(0, len(images), IMAGES_PER_FORWARD):
            part = slice(start, start + IMAGES_PER_FORWARD)
            values += self._scale(self._cosines(images[part], prompts[part])).tolist()
        finite = images.isfinite().flatten(1).all(dim=1)
        return Scores([value if good else None for value, good in zip(values, finite, strict=True)])

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """(N, dim), of length 1."""
        length = self._model.config.text_config.max_position_embeddings
        inputs = self._processor(
            text=list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        return _unit(self._model.get_text_features(**inputs.to(self._model.device)).pooler_output)

    def embed_images(self, pictures: Sequence[Image.Image]) -> Tensor:
        """(N, dim), of length 1."""
        inputs = self._processor(images=list(pictures), return_tensors="pt")
        return _unit(self._model.get_image_features(**inputs.to(self._model.device)).pooler_output)

    def _cosines(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pictures = [picture(image) for image in images]
        return (self.embed_images(pictures) * self.embed_texts(prompts)).sum(dim=-1)

    def _scale(self, cosines: Tensor) -> Tensor:
        return cosines


def located(source: str) -> Path:
    """The folder of a single model: a folder, a hub id or `id@revision`. Raises NotFoundError."""
    if Path(source).expanduser().is_dir():
        return hub.locate(source, None, ("",))
    path, _, revision = source.partition("@")
    return hub.locate(path, revision or None, ("",))


def picture(image: Tensor) -> Image.Image:
    """An RGB picture of (1 or 3, H, W) in [0, 1]; what is no number becomes black."""
    pixels = (image.float().nan_to_num(0.0, 0.0, 0.0).clamp(0, 1) * 255).round().byte()
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy())


def _unit(vectors: Any) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)
