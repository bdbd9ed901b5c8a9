"""OCR rewards: against brute force, on drawn text, and on what made others raise or pay for junk."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from spotlight.rl.rewards import load_reward
from spotlight.rl.rewards.ocr import edit_score, normalise, soft_score, target_of
from spotlight.rl.rewards.reader import shared_reader

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def drawn(
    text: str, height: int = 16, width: int = 32, size: int = 12, angle: float = 0, ink: int = 0
) -> Tensor:
    """(1, height, width) in [0, 1]: dark text in the middle of white paper; several lines by newlines."""
    picture = Image.new("L", (width, height), 255)
    canvas = ImageDraw.Draw(picture)
    face = ImageFont.truetype(str(FONTS / "DejaVuSans-Bold.ttf"), size)
    box = canvas.textbbox((0, 0), text, font=face)
    canvas.text(((width - box[0] - box[2]) / 2, (height - box[1] - box[3]) / 2), text, font=face, fill=ink)
    return torch.from_numpy(np.asarray(picture.rotate(angle, fillcolor=255)).copy())[None].float() / 255


def score(name: str, images: list[Tensor], targets: list[str]) -> list[float | None]:
    return load_reward(name).score(torch.stack(images), targets, [{"target": t} for t in targets]).values


def brute_force(probabilities: np.ndarray, target: list[list[int]]) -> float:
    """Sum over every path of labels whose collapse is the target."""
    total = 0.0
    symbols = {c: i for i, classes in enumerate(target) for c in classes}
    wanted = [min(classes) for classes in target]
    for path in itertools.product(range(probabilities.shape[1]), repeat=len(probabilities)):
        collapsed = [
            c for c, _ in itertools.groupby(min(target[symbols[c]]) if c in symbols else c for c in path)
        ]
        if [c for c in collapsed if c != 0] == wanted:
            total += math.prod(float(probabilities[t, c]) for t, c in enumerate(path))
    return total ** (1 / len(target))


@pytest.mark.parametrize(
    "target", [[[1]], [[1], [2]], [[1], [1]], [[2], [1], [2]], [[1, 3], [2]], [[1, 3], [1, 3]]]
)
def test_soft_score_equals_brute_force_over_all_paths(target: list[list[int]]) -> None:
    rng = np.random.default_rng(len(target))
    probabilities = rng.dirichlet(np.ones(4), size=5).astype(np.float32)
    assert soft_score(probabilities, target) == pytest.approx(brute_force(probabilities, target), rel=1e-4)


def test_further_silent_classes_count_as_blank() -> None:
    probabilities = np.random.default_rng(5).dirichlet(np.ones(4), size=5).astype(np.float32)
    merged = probabilities[:, :3].copy()
    merged[:, 0] += probabilities[:, 3]
    assert soft_score(probabilities, [[1], [1], [2]], blanks=(0, 3)) == pytest.approx(
        brute_force(merged, [[1], [1], [2]]), rel=1e-4
    )


def test_soft_score_equals_torchs_ctc() -> None:
    probabilities = np.random.default_rng(0).dirichlet(np.ones(11), size=12).astype(np.float32)
    labels = [3, 3, 7, 1]
    nll = torch.nn.functional.ctc_loss(
        torch.from_numpy(probabilities).double().log()[:, None],
        torch.tensor([labels]),
        [12],
        [4],
        reduction="sum",
    )
    assert soft_score(probabilities, [[c] for c in labels]) == pytest.approx(
        math.exp(-nll.item() / 4), rel=1e-4
    )


def test_soft_score_at_the_edges() -> None:
    certain = np.zeros((3, 3), np.float32)
    certain[[0, 1, 2], [1, 0, 1]] = 1
    assert soft_score(certain, [[1], [1]]) == pytest.approx(1.0)
    assert soft_score(certain, [[1]]) < 1e-3
    assert soft_score(certain, [[1]] * 3) == 0.0  # two equal neighbours need a step between them
    assert soft_score(np.zeros((0, 3), np.float32), [[1]]) == 0.0
    assert 0 < soft_score(certain, [[]]) < 1e-3  # a character the reader does not know: low, finite, no error


@pytest.mark.parametrize(
    ("reading", "target", "expected"),
    [
        ("123", "123", 1.0),
        ("12", "123", 2 / 3),
        ("", "123", 0.0),
        ("987654321", "123", 0.0),
        ("123123", "123", 0.0),
        ("x123", "123", 2 / 3),
        ("sale123sale", "123", 0.0),
    ],
)
def test_the_whole_reading_counts(reading: str, target: str, expected: float) -> None:
    assert edit_score(reading, target) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("E = mc²", "e=mc2"),
        ("Straße", "strasse"),
        ("ＡＢＣ １２", "abc12"),
        ("ﬁne", "fine"),
        ("a\u200bb\u202ec", "abc"),
        ("e\u0301", "é"),
        ("İ", "i̇"),
        ("\u3000\t\n", ""),
    ],
)
def test_normalise(text: str, normalised: str) -> None:
    assert normalise(text) == normalised
    assert normalise(normalised) == normalised


@pytest.mark.parametrize(
    ("prompt", "metadata", "target"),
    [
        ('a sign "HI there"', {}, "hithere"),
        ('a sign "HI"', {"target": "Bye"}, "bye"),
        ("a sign", {"target": 417}, "417"),
        ("a sign", {"target": ["A", "B"]}, "ab"),
        ("a sign", {"target": ""}, None),
        ("a sign", {"target": None}, None),
        ("a sign", {"target": {"text": "x"}}, None),
        ("a sign", {"target": True}, None),
        ('a sign ""', {}, None),
        ("no quotes here", {}, None),
    ],
)
def test_target_of(prompt: str, metadata: dict[str, object], target: str | None) -> None:
    assert target_of(prompt, metadata) == target


def test_drawn_digits_read_exactly() -> None:
    texts = ["7", "42", "703", "118", "999"]
    assert score("ocr", [drawn(t) for t in texts], texts) == [1.0] * 5
    assert min(score("ocr_soft", [drawn(t) for t in texts], texts)) > 0.8


def test_the_wrong_text_blank_paper_and_noise_score_low() -> None:
    noise = torch.rand(1, 16, 32, generator=torch.Generator().manual_seed(0))
    images = [drawn("703"), torch.ones(1, 16, 32), torch.zeros(1, 16, 32), noise]
    assert max(score("ocr", images, ["118"] * 4)) == 0.0
    assert max(score("ocr_soft", images, ["118"] * 4)) < 0.05


def test_the_soft_score_grades_what_the_edit_score_calls_equal() -> None:
    sharp, faint = drawn("703"), 0.5 * drawn("703") + 0.5 * drawn("763")
    easy, hard = score("ocr_soft", [sharp, faint], ["703", "703"])
    assert easy > hard > 0


def test_a_score_does_not_depend_on_the_batch() -> None:
    images, targets = (
        torch.stack([drawn(f"{i:03d}") for i in range(0, 900, 50)]),
        [f"{i:03d}" for i in range(0, 900, 50)],
    )
    metadata = [{"target": t} for t in targets]
    reward = load_reward("ocr_soft")
    whole = reward.score(images, targets, metadata).values
    for size in (1, 2, 5, 17):
        parts = [
            reward.score(images[i : i + size], targets[i : i + size], metadata[i : i + size]).values
            for i in range(0, len(images), size)
        ]
        assert [value for part in parts for value in part] == whole


def test_broken_pixels_and_no_target_fail_without_touching_the_neighbours() -> None:
    images = [drawn("703"), torch.full((1, 16, 32), math.nan), drawn("703"), drawn("703")]
    values = score("ocr", images, ["703", "703", "", "703"])
    assert values == [1.0, None, None, 1.0]


@pytest.mark.parametrize("target", ["E=mc²", "你好", "سلام", "☕🙂", "\u202e\u200b", "x" * 500, "\x00", "ﷺ"])
def test_no_target_raises(target: str) -> None:
    for name in ("ocr", "ocr_soft"):
        (value,) = score(name, [drawn("703")], [target])
        assert value is None or 0 <= value < 0.5


def test_info_holds_the_reading_for_people_to_look_at() -> None:
    scores = load_reward("ocr_soft").score(drawn("703")[None], ["a sign '703'"], [{}])
    assert scores.info == {"reading": ["703"], "target": ["703"], "edit": [1.0]}


def test_colour_is_read_as_well_as_grey() -> None:
    red = torch.cat([torch.ones(1, 16, 32), drawn("703"), drawn("703")])
    assert score("ocr", [red], ["703"]) == [1.0]


def test_the_reader_gives_distributions() -> None:
    (probabilities,) = shared_reader().read(drawn("703")[None])
    assert probabilities.shape[1] == len(shared_reader().characters)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-3)


@pytest.mark.slow
def test_a_large_picture_is_searched_for_its_lines() -> None:
    page = drawn("Spring\nCollection 2024", 256, 384, size=36)
    turned = drawn("OPEN LATE", 256, 384, size=48, angle=8)
    faint = drawn("quiet words", 256, 384, size=40, ink=190)
    empty = torch.ones(1, 256, 384)
    targets = ["Spring Collection 2024", "OPEN LATE", "quiet words", "nothing"]
    assert score("ocr", [page, turned, faint, empty], targets) == [1.0, 1.0, 1.0, 0.0]
    soft = score("ocr_soft", [page, turned, faint, empty], targets)
    assert min(soft[:3]) > 0.99  # spaces are silent: they do not cost
    assert soft[3] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("angle", [90, -90])
def test_a_line_that_stands_is_read_either_way(angle: float) -> None:
    assert score("ocr", [drawn("OPEN LATE", 384, 384, size=48, angle=angle)], ["OPEN LATE"]) == [1.0]


@pytest.mark.slow
def test_the_target_repeated_among_junk_does_not_pay() -> None:
    junk = drawn("SALE\nSALE SALE\nSALE", 256, 384, size=44)
    (value,) = score("ocr", [junk], ["SALE"])
    assert value == 0.0
