"""Contact sheets of any size of picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spotlight.observe import grids


@pytest.mark.parametrize(
    ("shape", "cell"),
    [((16, 32), (160, 80)), ((16, 32, 1), (160, 80)), ((512, 512, 3), (384, 384)),
     ((1280, 720, 3), (216, 384)),
     ((200, 300, 3), (300, 200)), ((1, 1), (160, 160)), ((1, 1280, 3), (384, 1))],
)  # fmt: skip
def test_small_ones_grow_by_whole_factors_and_large_ones_shrink(shape: Any, cell: tuple[int, int]) -> None:
    images = [np.full(shape, 200, np.uint8)] * 3
    sheet = grids.contact_sheet(images, ["a", "b", "c"], title="t", columns=2)
    gap = 8
    assert sheet.width == 2 * (cell[0] + gap) + gap
    assert sheet.height == 32 + 2 * (cell[1] + 18 + gap)


def test_the_pixels_are_the_model_s(tmp_path: Path) -> None:
    image = np.zeros((16, 32), np.uint8)
    image[3, 5] = 255
    path = grids.write_grid(tmp_path, 7, [image])
    assert path == tmp_path / "samples" / "it00007.png"
    pixels = np.asarray(Image.open(path))
    assert pixels[8 + 3 * 5 + 2, 8 + 5 * 5 + 2].tolist() == [255, 255, 255]
    assert pixels[8 + 3 * 5 + 2, 8 + 4 * 5 + 2].tolist() == [0, 0, 0]
    assert (pixels == 255).all(axis=2).sum() == 25


def test_colours_keep_their_order() -> None:
    image = np.zeros((512, 512, 3), np.uint8)
    image[..., 0] = 200
    assert grids.contact_sheet([image]).getpixel((100, 100)) == (200, 0, 0)


@pytest.mark.parametrize(
    "caption", ["", "482", "漢字 E=mc² \U0001f600", "line\nbreak\x1b[0m", "x" * 5000, "\u202eabc", "\ud800"]
)
def test_any_caption_can_be_drawn(caption: str) -> None:
    sheet = grids.contact_sheet([np.zeros((16, 32), np.uint8)], [caption], title=caption)
    assert sheet.width == 176


def test_no_more_than_64_and_none_at_all() -> None:
    image = np.zeros((16, 32), np.uint8)
    assert grids.contact_sheet([image] * 100).height == grids.contact_sheet([image] * 64).height
    assert grids.contact_sheet([]).width > 0


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (np.zeros((4, 4), np.float32), "uint8"),
        (np.zeros((4, 4, 4), np.uint8), "H, W"),
        (np.zeros((3, 4, 4, 3), np.uint8), "H, W"),
        (np.zeros((0, 4), np.uint8), "H, W"),
    ],
)
def test_what_is_no_image_is_refused(image: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grids.contact_sheet([image])


def test_captions_must_match() -> None:
    with pytest.raises(ValueError, match="2 images but 1 captions"):
        grids.contact_sheet([np.zeros((4, 4), np.uint8)] * 2, ["one"])


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    grids.write_png(Image.new("RGB", (4, 4)), path)
    before = path.read_bytes()
    with pytest.raises(OSError, match="cannot write mode"):
        grids.write_png(Image.new("F", (4, 4)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
