"""GenEval without a detector: flat circles, squares and triangles on plain paper, found by arithmetic.

Paper is what the border shows; connected areas of something else are objects. An area that holds two colours
is two objects that touch. The form is the one whose smallest enclosure the area fills best.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spotlight.rl.rewards import Metadata
from spotlight.rl.rewards.geneval import Detection, GenEvalReward

# GenEval's colour names in sRGB; white is what paper usually is.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "orange": (240, 140, 30),
    "yellow": (235, 210, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "purple": (140, 50, 170),
    "pink": (245, 150, 190),
    "brown": (120, 70, 30),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle")

MIN_CONTRAST = 18.0  # CIELAB distance from paper; 2.3 is just noticeable
MIN_AREA = 0.008  # of the picture, and never under 6 pixels
MIN_COLOR_SHARE = 0.25  # of an area, for a second colour to be a second object
MIN_FILL = 0.6  # below, the area has none of the three forms
ZOOM = 4  # contours of small pictures are traced at this scale

Mask = npt.NDArray[np.uint8]


def detect(image: Tensor, _metadata: Metadata | None = None) -> list[Detection]:
    """Objects in (1 or 3, H, W) in [0, 1]."""
    pixels = image.detach().float().cpu().clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0)
    lab = _lab(np.ascontiguousarray(pixels.numpy()))
    border = np.concatenate([lab[0], lab[-1], lab[:, 0], lab[:, -1]])
    contrast = np.linalg.norm(lab - np.median(border, axis=0), axis=-1)
    objects = []
    for area, color in _areas((contrast > MIN_CONTRAST).astype(np.uint8), lab):
        found = _detection(area, color, contrast)
        if found.confidence >= MIN_FILL:
            objects.append(found)
    return objects


def graded_reward() -> GenEvalReward:
    """`geneval_shapes_graded`: the share of what the prompt asks for."""
    return GenEvalReward(detect, graded=True)


def reward() -> GenEvalReward:
    """`geneval_shapes`: GenEval's 0 or 1."""
    return GenEvalReward(detect, graded=False)


def _areas(foreground: Mask, lab: npt.NDArray[np.float32]) -> Iterator[tuple[Mask, str]]:
    """One mask and colour per object."""
    least = max(6, MIN_AREA * foreground.size)
    for area in _components(foreground, least):
        names, counts = np.unique(_nearest(lab[_inner(area)]), return_counts=True)
        many = names[counts >= MIN_COLOR_SHARE * counts.sum()]
        if len(many) < 2:
            yield area, _color_of(area, lab)
            continue
        nearest = np.full(area.shape, -1)
        nearest[area > 0] = _nearest(lab[area > 0])
        for name in many:
            for part in _components((nearest == name).astype(np.uint8), least):
                yield part, list(COLORS)[name]


def _components(mask: Mask, least: float) -> Iterator[Mask]:
    """Connected areas (by edges, not corners) of at least `least` pixels."""
    count, labels, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
    for label in range(1, count):
        if stats[label, cv2.CC_STAT_AREA] >= least:
            yield (labels == label).astype(np.uint8)


def _color_of(area: Mask, lab: npt.NDArray[np.float32]) -> str:
    return list(COLORS)[_nearest(np.median(lab[_inner(area)], axis=0)[None])[0]]


def _inner(area: Mask) -> npt.NDArray[np.bool_]:
    """Without the rim, which is mixed with paper."""
    inner = cv2.erode(area, np.ones((3, 3), np.uint8), borderValue=0)
    return (inner if inner.any() else area) > 0


def _nearest(lab: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Index into COLORS of (N, 3); lightness counts half, shading should not rename a colour."""
    return np.linalg.norm((lab[:, None] - _PALETTE) * (0.5, 1, 1), axis=-1).argmin(axis=1)


def _detection(area: Mask, color: str, contrast: npt.NDArray[np.float32]) -> Detection:
    """How much of a rim pixel is covered shows in its contrast, so outlines are finer than pixels."""
    cover = area * np.minimum(contrast / np.median(contrast[_inner(area)]), 1)
    zoomed = cv2.resize(cover, None, fx=ZOOM, fy=ZOOM, interpolation=cv2.INTER_CUBIC)
    padded = cv2.copyMakeBorder(zoomed, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    contours, _ = cv2.findContours((padded > 0.5).astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    fills = _fills(max(contours, key=cv2.contourArea))
    label = max(fills, key=lambda name: fills[name])
    x, y, width, height = cv2.boundingRect(area)
    return Detection(label, (x, y, x + width, y + height), color, fills[label])


def _fills(contour: Any) -> dict[str, float]:
    """How much of the smallest enclosing circle, square and triangle a contour fills, in [0, 1]."""
    size = cv2.contourArea(contour)
    _, radius = cv2.minEnclosingCircle(contour)
    _, sides, _ = cv2.minAreaRect(contour)
    triangle = cv2.minEnclosingTriangle(contour)[0]
    enclosures = (np.pi * radius**2, max(sides) ** 2, triangle)
    return {
        name: min(1.0, size / enclosure) if enclosure else 0.0
        for name, enclosure in zip(SHAPES, enclosures, strict=True)
    }


def _lab(rgb: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return cv2.cvtColor(rgb, cv2.COLOR_RGB2LAB)


_PALETTE = _lab((torch.tensor(list(COLORS.values())) / 255).float().numpy()[None])[0]
