"""Is the text of the prompt readable in the image? Two rewards from one reading of PP-OCRv6.

`ocr` is 1 - min(d, n) / n, d the edit distance between the *whole* reading and the target of n characters:
junk around the target costs. `ocr_soft` is graded: exp of the target's mean log-likelihood per character
under the recogniser's CTC posteriors (Graves et al. 2006, ICML, eq. 5-8), in [0, 1].

Both compare after Unicode NFKC and case folding, without white space and format characters. The target is
`metadata["target"]` (a text, a number, or a list of them) or what the prompt has in quotes; a prompt that
asks for no text has no score.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from spotlight.rl.data import written_text
from spotlight.rl.rewards import Metadata, Scores
from spotlight.rl.rewards.reader import Floats, Reader, shared_reader

BLANK = 0
MIN_PROBABILITY = 1e-6  # keeps the score graded, and finite for a character that the model does not know


def normalise(text: str) -> str:
    """NFKC, case folded, without white space and format characters (zero-width, direction marks)."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(c for c in folded if not c.isspace() and unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFKC", kept)  # what is left may compose anew


def target_of(prompt: str, metadata: Metadata) -> str | None:
    """The normalised text that the image should show; None if none is asked for."""
    target = metadata.get("target", written_text(prompt))
    parts = target if isinstance(target, list | tuple) else [target]
    if any(isinstance(part, bool) or not isinstance(part, str | int | float) for part in parts):
        return None
    return normalise("".join(map(str, parts))) or None


def edit_score(reading: str, target: str) -> float:
    """1 - min(d, n) / n for two normalised texts; the target must not be empty."""
    return 1 - min(Levenshtein.distance(reading, target), len(target)) / len(target)


def soft_score(
    probabilities: Floats, target: Sequence[Sequence[int]], blanks: Sequence[int] = (BLANK,)
) -> float:
    """exp of the mean log-likelihood per target character under CTC posteriors.

    `probabilities` is (steps, classes); `target` lists, per character, the classes that count as it, and
    `blanks` those that count as the CTC blank. A target that needs more steps than there are scores 0.
    """
    emissions = _emissions(probabilities, target, blanks)
    states = range(emissions.shape[1])
    # A label may follow another directly, unless both are the same: then a blank must stand between.
    skips = np.array([i > 1 and i % 2 == 1 and target[i // 2] != target[i // 2 - 1] for i in states])
    alpha = np.full(emissions.shape[1], -np.inf)
    alpha[0] = 0.0  # before the first step: as if on the leading blank
    for emission in emissions:
        one_back = np.concatenate([[-np.inf], alpha[:-1]])
        two_back = np.where(skips, np.concatenate([[-np.inf, -np.inf], alpha[:-2]]), -np.inf)
        alpha = np.logaddexp(np.logaddexp(alpha, one_back), two_back) + emission
    log_likelihood = np.logaddexp(alpha[-1], alpha[-2]) if len(emissions) else -np.inf
    return float(min(1.0, np.exp(log_likelihood / len(target))))


def _emissions(
    probabilities: Floats, target: Sequence[Sequence[int]], blanks: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Log-probabilities (steps, 2 n + 1) of blank, label, blank, ..., label, blank."""
    table = np.empty((len(probabilities), 2 * len(target) + 1))
    table[:, ::2] = probabilities[:, list(blanks)].sum(axis=1, keepdims=True)
    for i, classes in enumerate(target):
        table[:, 2 * i + 1] = probabilities[:, list(classes)].sum(axis=1)
    return np.log(np.maximum(table, MIN_PROBABILITY))


class _Alphabet:
    """The reader's classes after normalisation: `A` and `a` are one character, a space is a blank."""

    def __init__(self, characters: Sequence[str]) -> None:
        self._folded = [normalise(character) for character in characters]
        self._classes: dict[str, list[int]] = {}
        for index, folded in enumerate(self._folded):
            self._classes.setdefault(folded, []).append(index)

    def soft_score(self, probabilities: Floats, target: str) -> float:
        classes = [self._classes.get(character, []) for character in target]
        return soft_score(probabilities, classes, self._classes[""])

    def decode(self, probabilities: Floats) -> str:
        """The best path: repeats merged, blanks (which fold to nothing) dropped."""
        best = probabilities.argmax(axis=1)
        return "".join(self._folded[c] for c, _ in itertools.groupby(best))


@cache
def _alphabet(reader: Reader) -> _Alphabet:
    return _Alphabet(reader.characters)


class _OcrReward:
    soft: bool

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """See `Reward.score`; `info` holds the readings, the targets and the other of the two scores."""
        reader = shared_reader()
        alphabet = _alphabet(reader)
        broken = ~images.isfinite().flatten(1).all(dim=1)
        info: dict[str, list[Any]] = {"reading": [], "target": [], "edit": [], "soft": []}
        posteriors = reader.read(images.nan_to_num(0.0, 0.0, 0.0))
        for probabilities, prompt, row, bad in zip(posteriors, prompts, metadata, broken, strict=True):
            target = None if bad else target_of(prompt, row)
            reading = alphabet.decode(probabilities)
            info["reading"].append(reading)
            info["target"].append(target)
            info["edit"].append(edit_score(reading, target) if target else None)
            info["soft"].append(alphabet.soft_score(probabilities, target) if target else None)
        return Scores(info.pop("soft") if self.soft else info.pop("edit"), info)


class EditReward(_OcrReward):
    """`ocr`: edit distance over the whole reading."""

    soft = False


class SoftReward(_OcrReward):
    """`ocr_soft`: CTC likelihood of the target."""

    soft = True
