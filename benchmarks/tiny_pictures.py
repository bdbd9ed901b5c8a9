"""What the embedded models are pre-trained on: drawn digits, and scenes of drawn shapes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from spotlight.rl import builtin, data
from spotlight.rl.rewards.geneval import Detection
from spotlight.rl.rewards.shapes import COLORS

PICTURES = 16_000

DIGITS_HEIGHT, DIGITS_WIDTH = 16, 32
FONTS = ("DejaVuSans-Bold.ttf", "DejaVuSerif-Bold.ttf")  # matplotlib carries them: no system font is needed
LENGTHS = (1, 2, 3)
LENGTH_WEIGHTS = (2, 6, 92)  # RL is about three digits; shorter ones are drawn so that the model can do them

SCENE_SIZE = 24
SCENE_WEIGHTS = {
    **dict.fromkeys(("single_object", "two_object", "colors"), 1),
    **dict.fromkeys(("counting", "color_attr", "position"), 3),
}
PLACES = {  # (x, y) in units of the picture: a small model has enough to learn without choosing them
    1: [(0.5, 0.5)],
    2: [(0.25, 0.5), (0.75, 0.5)],
    3: [(0.25, 0.25), (0.75, 0.25), (0.5, 0.75)],
    4: [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)],
}
RADII, SHIFT = (4.0, 5.0), 0.8  # pixels
SUPERSAMPLING = 4


def digits(seed: int) -> tuple[list[str], Tensor]:
    """Texts without the held-out ones and their pictures (N, 1, 16, 32) in [-1, 1]."""
    rng = random.Random(seed)
    held_out = _held_out("digits-held-out")
    texts: list[str] = []
    while len(texts) < PICTURES:
        text = "".join(rng.choices("0123456789", k=rng.choices(LENGTHS, LENGTH_WEIGHTS)[0]))
        if text not in held_out:
            texts.append(text)
    pictures = np.stack([draw_digits(text, rng) for text in texts])
    return texts, torch.from_numpy(pictures)[:, None].float() / 127.5 - 1


def draw_digits(text: str, rng: random.Random) -> np.ndarray:
    """Grey (16, 32) uint8: dark digits on light paper, jittered in place, ink, font and angle."""
    face = _font(rng.choice(FONTS), rng.choice((11, 12, 13)))
    paper, ink = rng.randint(200, 255), rng.randint(0, 110)
    picture = Image.new("L", (DIGITS_WIDTH, DIGITS_HEIGHT), paper)
    canvas = ImageDraw.Draw(picture)
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=face)
    x = (DIGITS_WIDTH - right - left) / 2 + rng.uniform(-1.5, 1.5)
    y = (DIGITS_HEIGHT - bottom - top) / 2 + rng.uniform(-1, 1)
    canvas.text((x, y), text, font=face, fill=ink)
    turned = picture.rotate(rng.uniform(-3, 3), resample=Image.Resampling.BILINEAR, fillcolor=paper)
    return np.asarray(turned, dtype=np.uint8)


def scenes(seed: int) -> tuple[list[str], Tensor]:
    """Prompts without the held-out ones and pictures (N, 3, 24, 24) in [-1, 1] that show what they say."""
    rng = random.Random(seed)
    held_out = _held_out("shapes-held-out")
    kinds = {tag: [row for row in rows if row[0] not in held_out] for tag, rows in builtin.scenes().items()}
    tags = rng.choices(list(SCENE_WEIGHTS), list(SCENE_WEIGHTS.values()), k=PICTURES)
    rows = [rng.choice(kinds[tag]) for tag in tags]
    pictures = np.stack([draw_scene(metadata, rng) for _, metadata in rows])
    return [text for text, _ in rows], torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def draw_scene(metadata: Mapping[str, Any], rng: random.Random) -> np.ndarray:
    """(24, 24, 3) uint8: flat shapes on light paper, where the metadata wants them."""
    picture = Image.new("RGB", (SCENE_SIZE * SUPERSAMPLING,) * 2, (rng.randint(235, 255),) * 3)
    canvas = ImageDraw.Draw(picture)
    for found in _arranged(metadata["include"], rng):
        ink = tuple(min(255, max(0, level + rng.randint(-12, 12))) for level in COLORS[found.color])
        x0, y0, x1, y1 = (side * SUPERSAMPLING for side in found.box)
        if found.label == "circle":
            canvas.ellipse((x0, y0, x1, y1), fill=ink)
        elif found.label == "square":
            slim = 0.05 * (x1 - x0)  # about as large as a circle
            canvas.rectangle((x0 + slim, y0 + slim, x1 - slim, y1 - slim), fill=ink)
        else:
            canvas.polygon([((x0 + x1) / 2, y0), (x0, y1), (x1, y1)], fill=ink)
    return np.asarray(picture.resize((SCENE_SIZE,) * 2, Image.Resampling.BOX), dtype=np.uint8)


def _arranged(include: Sequence[Mapping[str, Any]], rng: random.Random) -> list[Detection]:
    """Objects near the places of their number, in the order in which the prompt names them."""
    wanted = [entry for entry in include for _ in range(entry["count"])]
    places = PLACES[len(wanted)]
    relation = next((entry["position"][0] for entry in wanted if "position" in entry), "right of")
    if relation in ("above", "below"):
        places = [(y, x) for x, y in places]
    if relation in ("left of", "above"):  # the second is placed by the first
        places = places[::-1]
    found = []
    for entry, (x, y) in zip(wanted, places, strict=True):
        x, y = (at * SCENE_SIZE + rng.uniform(-SHIFT, SHIFT) for at in (x, y))
        radius = rng.uniform(*RADII)
        box = (x - radius, y - radius, x + radius, y + radius)
        color = entry.get("color") or rng.choice(builtin.COLORS)
        found.append(Detection(entry["class"], box, color, 1.0))
    return found


def _held_out(name: str) -> set[str]:
    return {prompt.text for prompt in data.load(f"builtin:{name}")}


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)
