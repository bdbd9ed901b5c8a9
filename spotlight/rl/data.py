"""Prompts: files in, rows out, and which rows an iteration trains on.

A group is a *row*, never a text: two equal prompts on two lines are two groups. Rows are counted from 0 over
the prompts that were read; blank lines are none. Whatever cannot be read is a DataError with file and line.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spotlight.errors import DataError

MAX_PROMPT_CHARS = 20_000
HELD_OUT_DIGITS = 200

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

Record = tuple[int, str, dict[str, Any]]  # line (from 1), prompt, metadata


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt file; `metadata` holds its other columns (`target`, GenEval's `include`, ...)."""

    row: int
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def load(source: str) -> list[Prompt]:
    """Read `builtin:NAME` or a .txt, .jsonl, .csv or .parquet file.

    .txt: a prompt per line. .jsonl: an object per line with the key `prompt` (GenEval's metadata files are
    such). .csv and .parquet: a column `prompt`. Raises DataError.
    """
    if source.startswith("builtin:"):
        return _builtin(source.removeprefix("builtin:"))
    path = Path(source)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown kind of prompt file", hint=f"known: {', '.join(_READERS)}")
    try:
        prompts = [
            Prompt(row, _checked(text, f"{path}:{line}"), _checked_metadata(metadata, f"{path}:{line}"))
            for row, (line, text, metadata) in enumerate(reader(path))
        ]
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
    """All three-digit strings in one fixed order: the first 200 are held out, 800 are trained on."""
    order = np.random.RandomState(7).permutation(1000)  # RandomState's stream never changes between versions
    parts = {"digits-held-out": order[:HELD_OUT_DIGITS], "digits-train": order[HELD_OUT_DIGITS:]}
    if name not in parts:
        near = difflib.get_close_matches(name, parts, 1) or list(parts)
        raise DataError(f"no built-in prompts {name[:80]!r}", hint=f"did you mean builtin:{near[0]}?")
    texts = [f"{number:03d}" for number in parts[name]]
    return [Prompt(row, text, {"target": text}) for row, text in enumerate(texts)]


def _checked(text: Any, where: str) -> str:
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
    return text


def _checked_metadata(metadata: dict[str, Any], where: str) -> dict[str, Any]:
    """Metadata travels as JSON, which has no NaN, no infinity, no bytes and no dates."""
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: metadata that is no JSON ({str(error)[:100]})") from None
    return metadata


def _read_txt(path: Path) -> Iterator[Record]:
    for line, text in _lines(path):
        yield line, text, {}


def _read_jsonl(path: Path) -> Iterator[Record]:
    for line, text in _lines(path):
        where = f"{path}:{line}"
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: a JSON object is wanted, not {type(record).__name__}")
        yield line, _take_prompt(record, where), record


def _read_csv(path: Path) -> Iterator[Record]:
    reader = csv.DictReader(io.StringIO(_decode(path), newline=""), strict=True)
    try:
        for record in reader:
            where = f"{path}:{reader.line_num}"
            if None in record or None in record.values():
                raise DataError(f"{where}: not as many fields as the header has")
            yield reader.line_num, _take_prompt(record, where), dict(record)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not CSV ({error})") from None


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow", hint="pip install pyarrow") from None
    try:
        with pq.ParquetFile(path) as file:
            # Pictures and other bytes stay behind: metadata travels as JSON.
            columns = [column.name for column in file.schema_arrow if not _is_bytes(column.type)]
            rows = (row for chunk in file.iter_batches(columns=columns) for row in chunk.to_pylist())
            for line, record in enumerate(rows, 1):
                yield line, _take_prompt(record, f"{path}:{line}"), record
    except pa.ArrowException as error:
        raise DataError(f"{path}: not parquet ({str(error)[:200]})") from None


def _is_bytes(kind: Any) -> bool:
    return "binary" in str(kind)


def _take_prompt(record: dict[str, Any], where: str) -> Any:
    if "prompt" not in record:
        near = difflib.get_close_matches("prompt", map(str, record), 1, cutoff=0.5)
        raise DataError(
            f"{where}: no `prompt`; there is {', '.join(map(str, record))[:200] or 'nothing'}",
            hint=f"rename {near[0]!r} to 'prompt'" if near else None,
        )
    return record.pop("prompt")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1, blank ones left out. LF, CRLF and CR end a line, nothing else does."""
    text = _decode(path).replace("\r\n", "\n").replace("\r", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.strip()


def _decode(path: Path) -> str:
    data = path.read_bytes()
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].decode(encoding, "ignore").count("\n") + 1
        raise DataError(
            f"{path}:{line}: not {encoding.upper()} at byte {error.start}", hint="save the file as UTF-8"
        ) from None


# UTF-32's mark begins with UTF-16's, so it comes first.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

_READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
