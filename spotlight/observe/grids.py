"""Contact sheets: what the model draws before, during and after, to be looked at and not only scored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from spotlight.observe.words import clean

MAX_IMAGES = 64
_SMALLEST_CELL_PX, _LARGEST_CELL_PX = 160, 384
_GAP_PX = 8
_PAPER, _INK, _FAINT = (250, 250, 248), (24, 24, 27), (113, 113, 122)


def contact_sheet(
    images: Sequence[NDArray[Any]],
    captions: Sequence[str] = (),
    *,
    title: str = "",
    columns: int = 8,
) -> Image.Image:
    """Lay images out on one labelled sheet.

    `images`: uint8 arrays (H, W), (H, W, 1) or (H, W, 3), of any sizes; the first 64 are drawn. Small ones
    are enlarged by a whole factor (pixels stay pixels), large ones reduced to 384 pixels. `captions`: one a
    piece, or none. Raises ValueError on another dtype or shape.
    """
    if captions and len(captions) != len(images):
        raise ValueError(f"{len(images)} images but {len(captions)} captions")
    tiles = [_tile(image) for image in images[:MAX_IMAGES]]
    cell_w = max((tile.width for tile in tiles), default=_SMALLEST_CELL_PX)
    cell_h = max((tile.height for tile in tiles), default=_SMALLEST_CELL_PX // 2)
    columns = max(1, min(columns, len(tiles) or 1))
    rows = max(1, -(-len(tiles) // columns))
    small, large = ImageFont.load_default(12), ImageFont.load_default(16)
    head, label = (32 if title else _GAP_PX), (18 if captions else 0)
    sheet = Image.new(
        "RGB",
        (columns * (cell_w + _GAP_PX) + _GAP_PX, head + rows * (cell_h + label + _GAP_PX)),
        _PAPER,
    )
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((_GAP_PX, 8), _fit(draw, clean(title), large, sheet.width - 2 * _GAP_PX), _INK, large)
    for index, tile in enumerate(tiles):
        x = _GAP_PX + (index % columns) * (cell_w + _GAP_PX)
        y = head + (index // columns) * (cell_h + label + _GAP_PX)
        sheet.paste(tile, (x + (cell_w - tile.width) // 2, y + (cell_h - tile.height) // 2))
        if captions:
            draw.text((x, y + cell_h + 2), _fit(draw, clean(captions[index]), small, cell_w), _FAINT, small)
    return sheet


def write_grid(
    folder: Path,
    iteration: int,
    images: Sequence[NDArray[Any]],
    captions: Sequence[str] = (),
    *,
    title: str = "",
    columns: int = 8,
) -> Path:
    """Write a sheet to `samples/it{iteration}.png` of a run folder, whole or not at all; return its path."""
    path = folder / "samples" / f"it{iteration:05d}.png"
    write_png(contact_sheet(images, captions, title=title, columns=columns), path)
    return path


def reduced(image: NDArray[Any]) -> NDArray[Any]:
    """An image as a sheet shows it, for it to travel: at most 384 pixels long. (H, W) or (H, W, 3), uint8."""
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((_LARGEST_CELL_PX, _LARGEST_CELL_PX), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def write_png(image: Image.Image, path: Path) -> None:
    """Write a PNG whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        image.save(part, format="PNG")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _tile(image: NDArray[Any]) -> Image.Image:
    if image.dtype != np.uint8:
        raise ValueError(f"an image is uint8, not {image.dtype}")
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3) or 0 in image.shape:
        raise ValueError(f"an image is (H, W), (H, W, 1) or (H, W, 3), not {image.shape}")
    tile = Image.fromarray(reduced(image)).convert("RGB")
    if (factor := _SMALLEST_CELL_PX // max(tile.size)) > 1:
        tile = tile.resize((tile.width * factor, tile.height * factor), Image.Resampling.NEAREST)
    return tile


def _fit(draw: ImageDraw.ImageDraw, text: str, font: Any, width_px: int) -> str:
    if draw.textlength(text, font) <= width_px:
        return text
    # Halve the interval: a caption may be thousands of characters long.
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if draw.textlength(text[:middle] + "...", font) <= width_px:
            low = middle
        else:
            high = middle - 1
    return text[:low] + "..."
