"""Prompt files of any size: one pass finds where each row is, and a row is read when it is asked for.

Of a text file the place of every row is remembered (8 bytes), of a parquet file how many rows each row group has; the
file stays open. So what a file costs in memory does not depend on what its rows hold.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

from spotlight.errors import DataError

CHUNK_BYTES = 1 << 20
MAX_LINE_CHARS = 16 << 20
ROW_GROUPS_KEPT = 8

Record = tuple[str, Any, dict[str, Any]]  # where it is, as `file:line`; prompt; metadata
See = Callable[[Record], object]

_LINE_END = re.compile("\r\n|\r|\n")
# UTF-32's mark begins with UTF-16's, so it comes first.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


class Rows(Protocol):
    """The rows of a file, by number."""

    def __len__(self) -> int:
        """How many there are."""

    def record(self, row: int) -> Record:
        """One of them. Raises DataError for one that cannot be read."""


def open_rows(path: Path, see: See | None) -> Rows:
    """Find all rows of a .txt, .jsonl, .csv or .parquet file and show each to `see`; None: only find them.

    Raises DataError with file and line for what cannot be read, and OSError.
    """
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"{path}: unknown kind of prompt file", hint=f"known: {', '.join(_KINDS)}")
    return kind(path, see)


class _TextRows:
    """Base of the kinds whose rows are stretches of text. A subclass says what they are and what is in one."""

    def __init__(self, path: Path, see: See | None) -> None:
        self._path = path
        self._file = path.open("rb")
        head = self._file.read(4)
        mark = next((mark for mark in _BYTE_ORDER_MARKS if head.startswith(mark)), b"")
        self._encoding = _BYTE_ORDER_MARKS.get(mark, "utf-8")
        self._file.seek(len(mark))
        self._starts = array("Q")
        for start, line, text in self._rows(self._lines(len(mark))):
            self._starts.append(start)
            if see is not None:
                see(self._parsed(f"{path}:{line}", text))
        self._end = self._file.tell()

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, row: int) -> Record:
        start = self._starts[row]
        stop = self._starts[row + 1] if row + 1 < len(self._starts) else self._end
        data = os.pread(self._file.fileno(), stop - start, start)  # no shared position: any thread may
        try:
            text = data.decode(self._encoding)
            return self._parsed(f"{self._path}, row {row}", text)
        except UnicodeDecodeError:
            raise DataError(f"{self._path}, row {row}: the file has changed since it was opened") from None

    def _rows(self, lines: Iterator[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
        """(start, line, text) of each row; a row ends where the next one starts."""
        return (line for line in lines if line[2].strip())

    def _parsed(self, where: str, text: str) -> Record:
        raise NotImplementedError

    def _lines(self, start: int) -> Iterator[tuple[int, int, str]]:
        """(start in bytes, number from 1, text with its end). LF, CRLF and CR end a line, nothing else does."""
        decoder = codecs.getincrementaldecoder(self._encoding)()
        number, rest, last = 1, "", False
        while not last:
            data = self._file.read(CHUNK_BYTES)
            last = not data
            pending = len(decoder.getstate()[0])
            try:
                rest += decoder.decode(data, final=last)
            except UnicodeDecodeError as error:
                at = self._file.tell() - len(data) - pending + error.start
                good = rest + error.object[: error.start].decode(self._encoding)
                raise self._undecodable(number + len(_LINE_END.findall(good)), at) from None
            # What ends here may go on: a CR may be half of a CRLF.
            ends = [end for m in _LINE_END.finditer(rest) if (end := m.end()) < len(rest)]
            for line in (rest[begin:end] for begin, end in pairwise([0, *ends])):
                yield start, number, line
                start += len(line.encode(self._encoding))
                number += 1
            rest = rest[ends[-1] :] if ends else rest
            if len(rest) > MAX_LINE_CHARS:
                raise DataError(f"{self._path}:{number}: a line of more than {MAX_LINE_CHARS} characters")
        yield start, number, rest

    def _undecodable(self, line: int, at: int) -> DataError:
        name = self._encoding.upper().removesuffix("-LE").removesuffix("-BE")
        return DataError(f"{self._path}:{line}: not {name} at byte {at}", hint="save the file as UTF-8")


class _Txt(_TextRows):
    """A prompt a line."""

    def _parsed(self, where: str, text: str) -> Record:
        return where, text.strip(), {}


class _Jsonl(_TextRows):
    """An object a line."""

    def _parsed(self, where: str, text: str) -> Record:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: a JSON object is wanted, not {type(record).__name__}")
        return where, _take_prompt(record, where), record


class _Csv(_TextRows):
    """A record a row, which may go over several lines; the first one names the columns."""

    _header: Sequence[str] = ()

    def _rows(self, lines: Iterator[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
        taken: list[tuple[int, int, str]] = []  # lines of the record that is being read

        def feed() -> Iterator[str]:
            for line in lines:
                taken.append(line)
                yield line[2]

        reader = csv.reader(feed(), strict=True)
        while True:
            taken.clear()
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{self._path}:{reader.line_num}: not CSV ({error})") from None
            if fields is None:
                return
            if not fields:
                continue
            if not self._header:
                self._header = fields
                continue
            yield taken[0][0], taken[-1][1], "".join(line for _, _, line in taken)

    def _parsed(self, where: str, text: str) -> Record:
        try:
            fields = next(row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row)
        except (csv.Error, StopIteration):
            raise DataError(f"{where}: the file has changed since it was opened") from None
        if len(fields) != len(self._header):
            raise DataError(f"{where}: not as many fields as the header has")
        record: dict[str, Any] = dict(zip(self._header, fields, strict=True))
        return where, _take_prompt(record, where), record


class _Parquet:
    """Row groups, a few of which are kept as they were read."""

    def __init__(self, path: Path, see: See | None) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise DataError(f"{path}: reading parquet needs pyarrow", hint="pip install pyarrow") from None
        self._path, self._error = path, pa.ArrowException
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
            # Pictures and other bytes stay behind: metadata travels as JSON.
            self._columns = [c.name for c in self._file.schema_arrow if "binary" not in str(c.type)]
            about = self._file.metadata
            sizes = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
            self._starts = [0, *accumulate(sizes)]
            if see is not None:
                for number, record in enumerate(self._stream(), 1):
                    see(self._parsed(f"{path}:{number}", record))
        except pa.ArrowException as error:
            raise DataError(f"{path}: not parquet ({str(error)[:200]})") from None
        self._group = lru_cache(maxsize=ROW_GROUPS_KEPT)(self._read_group)

    def __len__(self) -> int:
        return self._starts[-1]

    def record(self, row: int) -> Record:
        group = bisect_right(self._starts, row) - 1
        (record,) = self._group(group).slice(row - self._starts[group], 1).to_pylist()
        return self._parsed(f"{self._path}:{row + 1}", record)

    def _stream(self) -> Iterator[dict[str, Any]]:
        for batch in self._file.iter_batches(batch_size=1024, columns=self._columns):
            yield from batch.to_pylist()

    def _read_group(self, group: int) -> Any:
        try:
            return self._file.read_row_group(group, columns=self._columns)
        except self._error as error:
            raise DataError(f"{self._path}, row group {group}: not parquet ({str(error)[:200]})") from None

    def _parsed(self, where: str, record: dict[str, Any]) -> Record:
        return where, _take_prompt(record, where), record


def _take_prompt(record: dict[str, Any], where: str) -> Any:
    if "prompt" not in record:
        near = difflib.get_close_matches("prompt", map(str, record), 1, cutoff=0.5)
        raise DataError(
            f"{where}: no `prompt`; there is {', '.join(map(str, record))[:200] or 'nothing'}",
            hint=f"rename {near[0]!r} to 'prompt'" if near else None,
        )
    return record.pop("prompt")


_KINDS: dict[str, Callable[[Path, See | None], Rows]] = {
    ".txt": _Txt,
    ".jsonl": _Jsonl,
    ".csv": _Csv,
    ".parquet": _Parquet,
}
