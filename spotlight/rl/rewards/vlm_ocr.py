"""OCR by a vision-language model through transformers: DeepSeek-OCR, Qwen-VL and their like.

The score is `ocr`'s edit distance over the whole reading. Decoding is greedy: a sampled reading would make
the reward noisy, which exploration would take for differences between seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from spotlight.rl import hub
from spotlight.rl.rewards import Metadata, Scores
from spotlight.rl.rewards.clip import located, picture
from spotlight.rl.rewards.ocr import edit_score, normalise, target_of

ASK = "Read the text in this image. Answer with the text alone; answer with nothing if there is none."
PLAIN = "<image>\nFree OCR."  # for readers without a chat template: DeepSeek-OCR's own words
MAX_NEW_TOKENS = 128
IMAGES_PER_FORWARD = 8


class VlmOcr:
    """`vlm_ocr`: 1 - min(d, n) / n against what the prompt quotes (or `metadata["target"]`)."""

    default_source = "deepseek-community/DeepSeek-OCR-2"

    def __init__(self, source: str = "") -> None:
        folder = located(source or self.default_source)
        dtype = torch.bfloat16 if hub.device().type == "cuda" else torch.float32
        self._model = hub.load(AutoModelForImageTextToText, folder, dtype).to(hub.device())
        self._processor = hub.load_tokenizer(AutoProcessor, folder)
        self._processor.tokenizer.padding_side = "left"  # readings begin where prompts end

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """See `Reward.score`; `info` holds the readings and the targets."""
        finite = images.isfinite().flatten(1).all(dim=1).tolist()
        targets = [
            target_of(prompt, row) if good else None
            for prompt, row, good in zip(prompts, metadata, finite, strict=True)
        ]
        readings: list[str] = []
        for start in range(0, len(images), IMAGES_PER_FORWARD):
            readings += self.read(images[start : start + IMAGES_PER_FORWARD])
        values = [
            edit_score(normalise(reading), target) if target else None
            for reading, target in zip(readings, targets, strict=True)
        ]
        return Scores(values, {"reading": readings, "target": targets})

    @torch.no_grad()
    def read(self, images: Tensor) -> list[str]:
        """What the model says is written on (B, 1 or 3, H, W) in [0, 1]."""
        inputs = self._inputs([picture(image) for image in images]).to(self._model.device, self._model.dtype)
        output = self._model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        return self._processor.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )

    def _inputs(self, pictures: Sequence[Any]) -> Any:
        if self._processor.chat_template is None:
            return self._processor(
                images=list(pictures), text=[PLAIN] * len(pictures), padding=True, return_tensors="pt"
            )
        chats = [
            [{"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": ASK}]}]
            for shown in pictures
        ]
        return self._processor.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
