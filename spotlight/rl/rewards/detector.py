"""GenEval with its own kind of detector: Mask2Former finds COCO's objects, CLIP names their colours.

As in GenEval (arXiv 2310.11513): objects above 0.3 (0.9 for counting prompts), at most 16 of a class; an
object's colour is CLIP's choice among ten for its box, with everything outside its mask painted grey.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor
from transformers import Mask2FormerForUniversalSegmentation
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

from spotlight.rl import hub
from spotlight.rl.rewards import Metadata
from spotlight.rl.rewards.clip import ClipScore, located, picture
from spotlight.rl.rewards.geneval import Detection, GenEvalReward

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)
# GenEval's prompts are clearer than COCO's labels.
RENAMED = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}
THRESHOLD, COUNTING_THRESHOLD, MAX_OBJECTS = 0.3, 0.9, 16
GREY = (153, 153, 153)


class CocoDetector:
    """A `geneval.Detector`. `source` is `DETECTOR[,CLIP]`, each a folder, a hub id or `id@revision`."""

    def __init__(self, source: str = "") -> None:
        detector, _, clip = source.partition(",")
        folder = located(detector or DETECTOR)
        self._model = hub.load(Mask2FormerForUniversalSegmentation, folder, torch.float32).to(hub.device())
        self._processor = hub.load_tokenizer(Mask2FormerImageProcessorPil, folder)
        self._clip = ClipScore(clip)
        self._color_words: dict[str, Tensor] = {}

    def __call__(self, image: Tensor, metadata: Metadata) -> list[Detection]:
        """Objects in (1 or 3, H, W); the colour is looked at only where the prompt asks for one."""
        shown = picture(image)
        threshold = COUNTING_THRESHOLD if metadata.get("tag") == "counting" else THRESHOLD
        colored = {entry.get("class") for entry in metadata.get("include") or [] if entry.get("color")}
        per_class: dict[str, int] = {}
        found = []
        for label, score, mask in self._objects(shown, threshold):
            per_class[label] = per_class.get(label, 0) + 1
            if per_class[label] <= MAX_OBJECTS:
                color = self._color(shown, mask, label) if label in colored else ""
                found.append(Detection(label, box_of(mask), color, score))
        return found

    @torch.no_grad()
    def _objects(self, shown: Image.Image, threshold: float) -> Iterator[tuple[str, float, Tensor]]:
        """Label, score and mask (H, W) of every object, the surest first."""
        inputs = self._processor(images=shown, return_tensors="pt").to(self._model.device)
        outputs = self._model(pixel_values=inputs["pixel_values"])
        [result] = self._processor.post_process_instance_segmentation(
            outputs, threshold=threshold, target_sizes=[(shown.height, shown.width)], return_binary_maps=True
        )
        order = sorted(
            range(len(result["segments_info"])), key=lambda i: -result["segments_info"][i]["score"]
        )
        for i in order:
            segment = result["segments_info"][i]
            label = self._model.config.id2label[segment["label_id"]]
            yield RENAMED.get(label, label), segment["score"], result["segmentation"][i].bool().cpu()

    def _color(self, shown: Image.Image, mask: Tensor, label: str) -> str:
        crop = self._clip.embed_images([cut_out(shown, mask)])
        return COLORS[int((crop @ self._words(label).T).argmax())]

    def _words(self, label: str) -> Tensor:
        """(10, dim): for each colour the mean direction of its sentences."""
        if label not in self._color_words:
            texts = [template.format(color=c, name=label) for c in COLORS for template in TEMPLATES]
            means = self._clip.embed_texts(texts).view(len(COLORS), len(TEMPLATES), -1).mean(dim=1)
            self._color_words[label] = torch.nn.functional.normalize(means, dim=-1)
        return self._color_words[label]


def box_of(mask: Tensor) -> tuple[float, float, float, float]:
    """(x0, y0, x1, y1) around a mask (H, W) that is not empty."""
    rows, columns = mask.any(dim=1).nonzero().flatten(), mask.any(dim=0).nonzero().flatten()
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def cut_out(shown: Image.Image, mask: Tensor) -> Image.Image:
    """The box of an object, grey where the object is not."""
    stencil = Image.fromarray(mask.byte().mul(255).numpy())
    alone = Image.composite(shown, Image.new("RGB", shown.size, GREY), stencil)
    return alone.crop(box_of(mask))


def reward(source: str = "") -> GenEvalReward:
    """`geneval`: 0 or 1."""
    return GenEvalReward(CocoDetector(source), graded=False)


def graded_reward(source: str = "") -> GenEvalReward:
    """`geneval_graded`: the share of what the prompt asks for."""
    return GenEvalReward(CocoDetector(source), graded=True)
