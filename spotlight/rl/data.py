"""Prompts: files in, rows out, and which rows an iteration trains on.

A group is a *row*, never a text: two equal prompts on two lines are two groups. Rows are counted from 0 over
the prompts that were read; blank lines are none. Whatever cannot be read is a DataError with file and line.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

from spotlight.errors import DataError
from spotlight.rl import builtin
from spotlight.rl.prompt_files import Record, Rows, open_rows

MAX_PROMPT_CHARS = 20_000

# A letter beside a single quote makes it an apostrophe; not so a CJK one, which no space sets off.
_LETTER = r"[^\W\u2e80-\ud7ff]"
_DOUBLE_QUOTED = re.compile(
    "|".join(
        f"{opening}([^{opening}{closing}]*){closing}"
        for opening, closing in ('""', "“”", "„“", "«»", "「」", "『』", "＂＂")
    )
)
_SINGLE_QUOTED = re.compile(rf"(?<!{_LETTER})(?:'(.+?)'|‘(.+?)’)(?!{_LETTER})")
_QUOTES_ONLY = re.compile(r"""\s*["“”„«»「」『』＂‟'‘’]*\s*""")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt file; `metadata` holds its other columns (`target`, GenEval's `include`, ...)."""

    row: int
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Prompts(Sequence[Prompt]):
    """The rows of a prompt file, each read when it is asked for."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Prompt: ...
    @overload
    def __getitem__(self, row: slice) -> list[Prompt]: ...
    def __getitem__(self, row: int | slice) -> Prompt | list[Prompt]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        number = range(len(self))[row]
        return Prompt(number, *_checked(self._rows.record(number)))


def load(source: str, *, known: bool = False) -> Sequence[Prompt]:
    """Read `builtin:NAME` or a .txt, .jsonl, .csv or .parquet file.

    .txt: a prompt per line. .jsonl: an object per line with the key `prompt` (GenEval's metadata files are
    such). .csv and .parquet: a column `prompt`. Raises DataError. Every row is looked at once, unless the file is
    `known` to be good, and again as it is taken.
    """
    if source.startswith("builtin:"):
        return _builtin(source.removeprefix("builtin:"))
    path = Path(source)
    try:
        prompts = Prompts(open_rows(path, None if known else _checked))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not prompts:
        raise DataError(f"{path}: no prompts in it")
    return prompts


def batch(prompts: Sequence[Prompt], iteration: int, n: int, seed: int, shuffle: bool = True) -> list[Prompt]:
    """The `n` prompts of an iteration: a function of its arguments alone, so that of k + 1 is known at k.

    No row comes twice in a batch or in an epoch. Shuffled, an epoch is len // n batches of a fresh order (up
    to n - 1 rows sit it out); unshuffled, batches follow one another around the file.
    """
    if not 0 < n <= len(prompts):
        raise DataError(
            f"an iteration needs {n} different prompts, the file has {len(prompts)}",
            hint="lower data.prompts_per_iteration or add rows",
        )
    if not shuffle:
        return [prompts[(iteration * n + j) % len(prompts)] for j in range(n)]
    epoch, place = divmod(iteration, len(prompts) // n)
    order = np.random.default_rng([seed, epoch]).permutation(len(prompts))
    return [prompts[i] for i in order[place * n : (place + 1) * n]]


def written_text(prompt: str) -> str | None:
    """The text that a prompt asks to be written: what stands in quotes, several quotes joined by a space.

    Double, angle and corner quotes come before single ones, which a word's apostrophe must not open. Without
    quotes a prompt of one word is that word; None if nothing is asked for.
    """
    matches = list(_DOUBLE_QUOTED.finditer(prompt)) or list(_SINGLE_QUOTED.finditer(prompt))
    if matches:
        parts = (str(match[match.lastindex or 0]).strip() for match in matches)
        return " ".join(filter(None, parts)) or None
    one_word = len(prompt.split()) == 1 and not _QUOTES_ONLY.fullmatch(prompt)
    return prompt.strip() if one_word else None


def _builtin(name: str) -> list[Prompt]:
    parts = builtin.prompts()
    if name not in parts:
        near = difflib.get_close_matches(name, parts, 1) or list(parts)
        raise DataError(f"no built-in prompts {name[:80]!r}", hint=f"did you mean builtin:{near[0]}?")
    return [Prompt(row, text, metadata) for row, (text, metadata) in enumerate(parts[name])]


def _checked(record: Record) -> tuple[str, dict[str, Any]]:
    """Prompt and metadata of a record that is fit to travel; metadata goes as JSON."""
    where, text, metadata = record
    if not isinstance(text, str):
        raise DataError(f"{where}: the prompt is not a text but {type(text).__name__}")
    text = text.strip()
    if not text:
        raise DataError(f"{where}: the prompt is empty")
    if len(text) > MAX_PROMPT_CHARS:
        raise DataError(f"{where}: a prompt of {len(text)} characters; at most {MAX_PROMPT_CHARS}")
    if "\x00" in text:
        raise DataError(f"{where}: NUL characters", hint="binary, or UTF-16 without a byte order mark?")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise DataError(f"{where}: half of a surrogate pair, which is no character")
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: metadata that is no JSON ({str(error)[:100]})") from None
    return text, metadata
