"""The prompts that come with the package: three-digit strings, and scenes of shapes as GenEval describes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product
from typing import Any

import numpy as np

HELD_OUT_DIGITS = 200
HELD_OUT_SHARE = 3  # one of so many scenes of each kind is held out
SCENES_PER_TAG = 144

SHAPES = ("circle", "square", "triangle")
COLORS = ("red", "yellow", "green", "blue")
NUMBERS = ("a", "two", "three", "four")
RELATIONS = ("left of", "right of", "above", "below")
SCENE_WORDS = (
    *(*NUMBERS, "and", "left", "right", "of", "above", "below", *COLORS),
    *(word for shape in SHAPES for word in (shape, f"{shape}s")),
)

Row = tuple[str, dict[str, Any]]  # prompt, metadata


def prompts() -> dict[str, list[Row]]:
    """By name; the parts of a pair share no prompt. One fixed order, the same in every version."""
    digits = _shuffled([(f"{number:03d}", {"target": f"{number:03d}"}) for number in range(1000)])
    held_out: list[Row] = []
    train: list[Row] = []
    for rows in scenes().values():
        chosen = _shuffled(rows)[:SCENES_PER_TAG]
        held_out += chosen[: len(chosen) // HELD_OUT_SHARE]
        train += chosen[len(chosen) // HELD_OUT_SHARE :]
    return {
        "digits-held-out": digits[:HELD_OUT_DIGITS],
        "digits-train": digits[HELD_OUT_DIGITS:],
        "shapes-held-out": _shuffled(held_out),
        "shapes-train": _shuffled(train),
    }


def scenes() -> dict[str, list[Row]]:
    """Every scene of GenEval's six kinds; counted shapes have a colour here, and so do placed ones."""
    shapes, pairs = list(SHAPES), list(permutations(SHAPES, 2))
    colors, colored = list(permutations(COLORS, 2)), list(product(COLORS, SHAPES))
    return {
        "single_object": [_row("single_object", [_one(shape)]) for shape in shapes],
        "two_object": [_row("two_object", [_one(a), _one(b)]) for a, b in pairs],
        "counting": [
            _row("counting", [{"class": shape, "count": count, "color": color}])
            for count, (color, shape) in product((2, 3, 4), colored)
        ],
        "colors": [_row("colors", [_one(shape, color)]) for color, shape in colored],
        "color_attr": [
            _row("color_attr", [_one(a, c), _one(b, d)]) for (a, b), (c, d) in product(pairs, colors)
        ],
        "position": [
            _row("position", [_one(b, d), _one(a, c) | {"position": [relation, 0]}])
            for (a, b), (c, d), relation in product(pairs, colors, RELATIONS)
        ],
    }


def _one(shape: str, color: str | None = None) -> dict[str, Any]:
    return {"class": shape, "count": 1} | ({"color": color} if color else {})


def _row(tag: str, include: list[dict[str, Any]]) -> Row:
    metadata: dict[str, Any] = {"tag": tag, "include": include}
    if tag == "counting":
        metadata["exclude"] = [{"class": one["class"], "count": one["count"] + 1} for one in include]
    names = [_name(entry) for entry in include]
    if tag == "position":  # GenEval names the placed object first
        return f"{names[1]} {include[1]['position'][0]} {names[0]}", metadata
    return " and ".join(names), metadata


def _name(entry: dict[str, Any]) -> str:
    number = NUMBERS[entry["count"] - 1]
    shape = entry["class"] + ("s" if entry["count"] > 1 else "")
    return " ".join([number, *([entry["color"]] if "color" in entry else []), shape])


def _shuffled(rows: Sequence[Row]) -> list[Row]:
    order = np.random.RandomState(7).permutation(len(rows))  # its stream never changes between versions
    return [rows[i] for i in order]
