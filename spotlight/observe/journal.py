"""The journal: one append-only stream of JSON lines, from which `verify`, cost and report know what happened.

A line is a record: `v` (schema), `seq` (1, 2, ... over the whole journal), `utc` (Unix seconds), `type`, and
    start    a coordinator began: its `policy` and the `first_token` that it gives
    on       the scheduler took an event: `now`, `event`, `commands`, and `drafts`, the draft source's answers
    gap      `lost` records before this one could not be written: `reason`
    other    what others write through `append`: "node" (money), "iteration", ...

A writer killed at any byte leaves at most a torn last line in the segment that it wrote; the next writer
opens a new segment. A full disk loses records, says so, and leaves a gap record once there is room again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from spotlight.errors import DataError, LockError, NotFoundError

SCHEMA = 1
Fsync = Literal["always", "interval", "never"]
_AS_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
log = logging.getLogger(__name__)


class Journal:
    """The one writer of a journal folder.

    `fsync`: "always" after each record, "interval" at most every `fsync_every_s` (a power cut may cost so
    much; a killed process costs nothing, each record reaches the operating system at once), or "never".
    """

    def __init__(
        self,
        folder: Path,
        *,
        fsync: Fsync = "interval",
        fsync_every_s: float = 1.0,
        segment_bytes: int = 64_000_000,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.lost = 0
        self.problem: str | None = None
        self._fsync, self._fsync_every_s = fsync, fsync_every_s
        self._segment_bytes = segment_bytes
        self._gap = 0
        self._fd = -1
        self._size = 0
        self._synced_at = time.monotonic()
        paths = segments(folder)
        self._segment = _number(paths[-1]) if paths else 0
        self._seq = _last_seq(paths)
        self._begin()

    def append(self, record: Mapping[str, Any]) -> bool:
        """Write one record; True when it reached the operating system.

        Raises ValueError or TypeError, with nothing written, if it is not JSON.
        """
        if self._gap and not self._write({"type": "gap", "lost": self._gap, "reason": self.problem}):
            self._lose()
            return False
        self._gap = 0
        if not self._write(record):
            self._lose()
            return False
        return True

    def sync(self) -> None:
        """Bring everything to the disk, if that is due."""
        if self._fd >= 0 and self._fsync == "interval":
            now = time.monotonic()
            if now - self._synced_at >= self._fsync_every_s:
                self._synced_at = now
                self._try(os.fsync)

    def close(self) -> None:
        """Bring everything to the disk and close. Appending again opens a new segment."""
        if self._fd >= 0:
            self._try(os.fsync)
            self._try(os.close)
            self._fd = -1

    def _write(self, record: Mapping[str, Any]) -> bool:
        head = {"v": SCHEMA, "seq": self._seq + 1, "utc": round(time.time(), 6)}
        body = {**head, **record, **head}  # no record says its own number
        line = _AS_JSON(body).encode() + b"\n"
        try:
            if self._fd < 0 or self._size + len(line) > self._segment_bytes:
                self._open_segment()
            _write_all(self._fd, line)
            if self._fsync == "always":
                os.fsync(self._fd)
        except OSError as error:
            self._fail(error)
            return False
        self._size += len(line)
        self._seq += 1
        if self.problem:
            log.warning("journal: writing again; %d records were lost", self._gap)
            self.problem = None
        return True

    def _begin(self) -> None:
        """Claim the next segment: whoever comes second finds it taken."""
        try:
            self._open_segment()
        except FileExistsError:
            raise LockError(f"{self.folder} is being written by another coordinator") from None
        except OSError as error:
            self._fail(error)

    def _open_segment(self) -> None:
        self.close()
        path = self.folder / f"{self._segment + 1:06d}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._segment += 1
        self._size = 0

    def _fail(self, error: OSError) -> None:
        """Say it once, and cut off what was half written, so that the next line starts on its own."""
        if self.problem is None:
            log.error("journal: %s: %s; the run goes on without it", self.folder, error.strerror or error)
        self.problem = error.strerror or str(error)
        if self._fd >= 0 and not self._try(lambda fd: os.ftruncate(fd, self._size)):
            self._try(os.close)  # then the next line starts a new segment
            self._fd = -1

    def _lose(self) -> None:
        self._gap += 1
        self.lost += 1

    def _try(self, call: Callable[[int], None]) -> bool:
        try:
            call(self._fd)
        except OSError as error:
            self.problem = error.strerror or str(error)
            return False
        return True


def segments(folder: Path) -> list[Path]:
    """The files of a journal, oldest first. A folder that is not there has none."""
    return sorted(folder.glob("[0-9][0-9][0-9][0-9][0-9][0-9]*.jsonl"), key=_number)


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Stream the records, oldest first. Safe beside a live writer.

    A torn last line of a segment is passed over. Raises NotFoundError if there is no journal, DataError
    naming file and line for anything else that is not a record of this schema.
    """
    paths = segments(folder)
    if not paths:
        raise NotFoundError(f"no journal in {folder}", hint="spotlight status   lists the newest run")
    for path in paths:
        yield from _read_segment(path)


def next_first_token(folder: Path) -> int:
    """Where a new coordinator's tokens begin: far above all that earlier ones can have given."""
    starts = 0
    for path in segments(folder):
        with path.open("rb") as file:
            starts += sum(b'"type":"start"' in line for line in file)
    return (starts << 32) + 1


def _read_segment(path: Path) -> Iterator[dict[str, Any]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    with file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    return  # torn: the writer was killed here, or is just writing
                raise DataError(f"{path.name}, line {number}: not JSON") from None
            if not isinstance(record, dict) or not isinstance(record.get("type"), str):
                raise DataError(f"{path.name}, line {number}: not a journal record")
            if record.get("v") != SCHEMA:
                raise DataError(
                    f"{path.name}, line {number}: schema {str(record.get('v'))[:20]}, this reads {SCHEMA}",
                    hint="read it with the version of spotlight that wrote it",
                )
            yield record


def _number(path: Path) -> int:
    return int(path.stem)


def _last_seq(paths: list[Path]) -> int:
    """The last number given. Goes back as far as it must; what cannot be read has none."""
    for path in reversed(paths):
        for line in reversed(path.read_bytes().splitlines()):
            try:
                return int(json.loads(line)["seq"])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
    return 0


def _write_all(fd: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(fd, data[written:])
