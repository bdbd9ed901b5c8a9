"""The PP-OCRv6 models inside the `rapidocr` wheel as a reader that gives posteriors, not only text.

A picture up to 64 pixels high is one line and goes to the recogniser as it is. A higher one goes through the
text detector first; its lines, in reading order, are recognised one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from spotlight.errors import PreconditionError

Floats = npt.NDArray[np.float32]

LINE_HEIGHT = 48  # what the recogniser was trained on; one output step is 8 pixels wide
MAX_ONE_LINE_HEIGHT = 64
MAX_LINE_WIDTH = 2048
DETECTOR_SIDE = 960  # the wheel's own default blows a small picture up to 736 pixels: seconds an image
BATCH = 16


class Reader:
    """Recognises text on the CPU with one thread; equal pictures give bit-equal posteriors in any batch."""

    def __init__(self) -> None:
        self._session = _session(_models() / "PP-OCRv6_rec_small.onnx")
        self._input = self._session.get_inputs()[0].name
        self._detector_lock = threading.Lock()
        self._detector: Any = None
        characters = self._session.get_modelmeta().custom_metadata_map["character"]
        self.characters: list[str] = ["", *characters.splitlines(), " "]

    def read(self, images: Tensor) -> Iterator[Floats]:
        """Per image of (B, 1 or 3, H, W) in [0, 1]: probabilities (steps, classes), class 0 the CTC blank.

        A picture without text may have no steps.
        """
        images = images.detach().float().cpu().clamp(0, 1)
        images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
        if images.shape[-2] <= MAX_ONE_LINE_HEIGHT:
            yield from self._recognise(_to_line(images))
        else:
            for image in images:
                yield self._read_page(image)

    def _recognise(self, lines: Tensor) -> Iterator[Floats]:
        """Posteriors of equally wide lines (N, 3, 48, W) in RGB."""
        pixels = (lines.flip(1) * 2 - 1).numpy()  # the models are trained on BGR in [-1, 1]
        for start in range(0, len(pixels), BATCH):
            chunk = pixels[start : start + BATCH]
            # A batch of one takes another path through the matrix product, with other last bits.
            padded = chunk if len(chunk) > 1 else np.concatenate([chunk, chunk])
            yield from self._session.run(None, {self._input: padded})[0][: len(chunk)]

    def _read_page(self, image: Tensor) -> Floats:
        read = [self._read_upright(crop) for crop in self._crops(image)]
        return np.concatenate(read) if read else np.zeros((0, len(self.characters)), np.float32)

    def _read_upright(self, crop: Tensor) -> Floats:
        """A crop (3, h, w) as it is; one that stands is turned both ways, and the surer reading counts."""
        stands = crop.shape[1] >= 1.5 * crop.shape[2]
        turned = [crop.rot90(quarter, (1, 2)) for quarter in (1, -1)] if stands else [crop]
        readings = [next(self._recognise(_to_line(line[None]))) for line in turned]
        return max(readings, key=_certainty)

    def _crops(self, image: Tensor) -> Iterator[Tensor]:
        """Text lines (3, h, w) of (3, H, W) in [0, 1], top to bottom and left to right."""
        import cv2

        page = np.ascontiguousarray((image.flip(0).permute(1, 2, 0) * 255).round().byte().numpy())
        for corners in self._detect(page):
            top, right, bottom, left = (
                float(np.linalg.norm(corners[i] - corners[(i + 1) % 4])) for i in range(4)
            )
            width, height = max(1, round(max(top, bottom))), max(1, round(max(left, right)))
            flat = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
            transform = cv2.getPerspectiveTransform(corners.astype(np.float32), flat)
            crop = cv2.warpPerspective(page, transform, (width, height), borderMode=cv2.BORDER_REPLICATE)
            yield torch.from_numpy(crop).permute(2, 0, 1).flip(0).float() / 255

    def _detect(self, page: npt.NDArray[np.uint8]) -> Any:
        """Quadrilaterals (N, 4, 2) in pixels of a BGR page (H, W, 3)."""
        with self._detector_lock:  # the detector keeps state of the picture it is working on
            if self._detector is None:
                self._detector = _detector()
            boxes = self._detector(page, use_det=True, use_cls=False, use_rec=False).boxes
        return [] if boxes is None else boxes


@cache
def shared_reader() -> Reader:
    """One reader per process."""
    return Reader()


def _certainty(probabilities: Floats) -> float:
    """Mean probability of the best class where that is a character; 0 for a line without any."""
    read = probabilities.argmax(axis=1) > 0
    return float(probabilities[read].max(axis=1).mean()) if read.any() else 0.0


def _to_line(images: Tensor) -> Tensor:
    """Resize (B, 3, H, W) to 48 pixels high, a multiple of 8 wide."""
    height, width = images.shape[-2:]
    wide = min(max(LINE_HEIGHT, 8 * round(LINE_HEIGHT * width / height / 8)), MAX_LINE_WIDTH)
    resized = F.interpolate(
        images, size=(LINE_HEIGHT, wide), mode="bicubic", align_corners=False, antialias=height > LINE_HEIGHT
    )
    return resized.clamp(0, 1)


def _models() -> Path:
    spec = find_spec("rapidocr")
    if spec is None or spec.origin is None:
        raise PreconditionError("the OCR reward needs rapidocr", hint="pip install rapidocr onnxruntime")
    return Path(spec.origin).parent / "models"


def _session(path: Path) -> Any:
    try:
        import onnxruntime as ort
    except ImportError:
        raise PreconditionError("the OCR reward needs onnxruntime", hint="pip install onnxruntime") from None
    if not path.is_file():
        raise PreconditionError(f"rapidocr has no {path.name}", hint="pip install 'rapidocr>=3.10,<3.11'")
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _detector() -> Any:
    from rapidocr import RapidOCR

    return RapidOCR(
        params={
            "Global.log_level": "error",
            "Det.limit_side_len": DETECTOR_SIDE,
            "Det.limit_type": "max",
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )
