"""PickScore (Kirstain et al. 2023, arXiv 2305.01569): CLIP-H trained on which of two images people picked."""

from __future__ import annotations

from torch import Tensor

from spotlight.rl.rewards.clip import ClipScore


class PickScore(ClipScore):
    """`pickscore`: the model's temperature times the cosine, about 18 to 24, as tables report it.

    Beside a reward in [0, 1] give it a weight of about 1/26.
    """

    default_source = "yuvalkirstain/PickScore_v1"
    default_processor = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

    def _scale(self, cosines: Tensor) -> Tensor:
        return self._model.logit_scale.exp() * cosines
