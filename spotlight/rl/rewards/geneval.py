"""GenEval (Ghosh et al. 2023, arXiv 2310.11513): are the right objects there, in number, colour and place?

A prompt's metadata lists what must be there, `include: [{class, count, color?, position?}]` with the position
as [relation, index of an earlier entry], and what must not, `exclude: [{class, count}]` (fewer than `count`).
Whoever finds the objects, a detector or a checker of drawn shapes, hands over `Detection`s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spotlight.rl.rewards import Metadata, Scores

RELATIONS = ("left of", "right of", "above", "below")
OVERLAP_ALLOWED = 0.1  # how much of both sizes a distance must exceed to count, GenEval's position_threshold
MAX_COUNT = 1000


@dataclass(frozen=True, slots=True)
class Detection:
    """An object that was found; the box is (x0, y0, x1, y1), y down."""

    label: str
    box: tuple[float, float, float, float]
    color: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`correct` is GenEval's own answer; `graded`, in [0, 1], is 1 exactly when it is correct."""

    correct: bool
    graded: float


Detector = Callable[[Tensor, Metadata], Sequence[Detection]]


def judge(detections: Sequence[Detection], metadata: Metadata) -> Verdict:
    """Check what was found against what the prompt asks for.

    Per entry of `include` only the `count` most confident objects of the class are looked at, as in GenEval.
    `graded` is the mean of a term for each thing asked: the share of the count, of the colours, of the pairs
    in the right relation, and for `exclude` the share of objects that is allowed. Raises ValueError for
    metadata that is no GenEval entry.
    """
    include, exclude = _entries(metadata, "include"), _entries(metadata, "exclude")
    if not include and not exclude:
        raise ValueError("neither `include` nor `exclude`")
    ranked = sorted(detections, key=lambda found: -found.confidence)
    terms: list[float] = []
    groups: list[list[Detection]] = []  # empty where an entry did not match
    for entry in include:
        matched, found = _include_terms(entry, ranked, groups)
        terms += matched
        groups.append(found if all(term == 1 for term in matched) else [])
    for entry in exclude:
        present = sum(found.label == entry["class"] for found in ranked)
        terms.append(1.0 if present < entry["count"] else (entry["count"] - 1) / present)
    return Verdict(all(term == 1 for term in terms), sum(terms) / len(terms))


def relations(a: Detection, b: Detection) -> set[str]:
    """Where `a` is from `b`: up to two of RELATIONS, none when they are too close for their size."""
    box_a, box_b = np.array(a.box, dtype=float).reshape(2, 2), np.array(b.box, dtype=float).reshape(2, 2)
    offset = box_a.mean(axis=0) - box_b.mean(axis=0)
    slack = OVERLAP_ALLOWED * (np.ptp(box_a, axis=0) + np.ptp(box_b, axis=0))
    clear = np.sign(offset) * np.maximum(np.abs(offset) - slack, 0)
    if np.all(np.abs(clear) < 1e-3):
        return set()
    x, y = clear / np.linalg.norm(offset)
    holds = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {relation for relation, true in holds.items() if true}


def _include_terms(
    entry: Mapping[str, Any], ranked: Sequence[Detection], groups: Sequence[Sequence[Detection]]
) -> tuple[list[float], list[Detection]]:
    """Terms in [0, 1] of one entry, and the objects that were looked at."""
    count = entry["count"]
    found = [detection for detection in ranked if detection.label == entry["class"]][:count]
    enough = len(found) == count
    terms = [len(found) / count]
    if "color" in entry:
        terms.append(sum(detection.color == entry["color"] for detection in found) / count)
    if "position" in entry:
        relation, index = entry["position"]
        pairs = [relation in relations(one, other) for one in found for other in groups[index]]
        terms.append(sum(pairs) / len(pairs) if enough and pairs else 0.0)
    return terms, found


def _entries(metadata: Metadata, key: str) -> list[Mapping[str, Any]]:
    entries = metadata.get(key) or []  # a columnar file has null where a row has no such key
    if not isinstance(entries, list | tuple):
        raise ValueError(f"`{key}` is no list")
    return [_entry(entry, number) for number, entry in enumerate(entries)]


def _entry(entry: Any, number: int) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class"), str):
        raise ValueError("an entry without a `class`")
    count = entry.get("count")
    if not isinstance(count, int) or not 1 <= count <= MAX_COUNT:
        raise ValueError(f"`count` is {count!r}")
    entry = {key: value for key, value in entry.items() if value is not None}
    if "position" in entry:
        position = entry["position"]
        if not isinstance(position, list | tuple) or len(position) != 2 or position[0] not in RELATIONS:
            raise ValueError(f"`position` is {position!r}")
        if not isinstance(position[1], int) or not 0 <= position[1] < number:
            raise ValueError(f"`position` refers to entry {position[1]!r}, which does not come before it")
    return entry


class GenEvalReward:
    """Judges what `detect` finds; a prompt without GenEval metadata has no score."""

    def __init__(self, detect: Detector, *, graded: bool) -> None:
        self._detect = detect
        self._graded = graded

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """See `Reward.score`; `info` has GenEval's own answer, what was found, why a score is missing."""
        values: list[float | None] = []
        info: dict[str, list[Any]] = {"correct": [], "found": [], "error": []}
        for image, row in zip(images, metadata, strict=True):
            verdict, found, error = self._judge(image, row)
            values.append(
                None if verdict is None else verdict.graded if self._graded else float(verdict.correct)
            )
            info["correct"].append(None if verdict is None else verdict.correct)
            info["found"].append([f"{detection.color} {detection.label}" for detection in found])
            info["error"].append(error)
        return Scores(values, info)

    def _judge(self, image: Tensor, row: Metadata) -> tuple[Verdict | None, Sequence[Detection], str | None]:
        if not image.isfinite().all():
            return None, [], "the image is not finite"
        found = self._detect(image, row)
        try:
            return judge(found, row), found, None
        except ValueError as error:
            return None, found, f"no GenEval metadata: {error}"
