"""Append-only files of one JSON object a line, for a writer that may be killed at any byte."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

MAX_LINE_CHARS = 4_000_000


class JsonLines:
    """Append and flush, line by line. A full disk is counted and reported, never raised: runs go on.

    `lost` counts records that could not be written, `problem` holds the last reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self.problem: str | None = None
        self._file: IO[str] | None = None
        self._torn = False

    def append(self, record: Mapping[str, Any]) -> bool:
        """Write one record; True when it reached the operating system."""
        line = json.dumps(finite(record), ensure_ascii=False, separators=(",", ":"), default=str)
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._torn = _ends_torn(self.path)
                # Surrogates (from undecodable bytes in a name or prompt) must not stop a run.
                self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
            self._file.write(("\n" if self._torn else "") + line + "\n")
            self._file.flush()
            self._torn = False
        except OSError as error:
            self._fail(error)
            return False
        return True

    def close(self) -> None:
        """Close the file; safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.problem = f"{self.path.name}: {error.strerror or error}"

    def _fail(self, error: OSError) -> None:
        self.lost += 1
        self.problem = f"{self.path.name}: {error.strerror or error}"
        # A new handle next time: the old one may hold half a line in its buffer.
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                return


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, oldest first; torn, foreign and oversized lines are passed over.

    A missing file has no lines.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(MAX_LINE_CHARS):
            record = _parse(line)
            if record is not None:
                yield record


def batches(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield, each time it is asked, the records that are new since the last time; without end.

    A line that is still being written waits for the next time.
    """
    position = 0
    while True:
        records = []
        if path.is_file():
            with path.open("rb") as file:
                file.seek(position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    record = _parse(line.decode("utf-8", "replace"))
                    records += [] if record is None else [record]
        yield records


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON has no word for, by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    # numpy scalars of a metric: plain numbers without importing numpy here.
    if hasattr(value, "item") and not hasattr(value, "__len__"):
        return finite(value.item())
    return value


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _ends_torn(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
