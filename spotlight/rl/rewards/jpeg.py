"""The size of an image as JPEG, a reward without a model: DDPO (Black et al. 2023, arXiv 2305.13301)."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from spotlight.rl.rewards import Metadata, Scores

QUALITY = 95


class JpegIncompressibility:
    """`jpeg_incompressibility`: kilobytes (1000 bytes) at quality 95; the more detail, the higher."""

    sign = 1

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """See `Reward.score`."""
        return Scores([self._one(image) for image in images])

    def _one(self, image: Tensor) -> float | None:
        if not image.isfinite().all():
            return None
        pixels = (image.float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).squeeze(-1).numpy()
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
        return self.sign * buffer.tell() / 1000


class JpegCompressibility(JpegIncompressibility):
    """`jpeg_compressibility`: minus the kilobytes; the plainer, the higher."""

    sign = -1
