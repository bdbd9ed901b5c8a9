"""Where interruption notices come from. One source per cloud; a node polls those that fit it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Interruption:
    """The node will be taken in `deadline_s` seconds, says `source`."""

    deadline_s: float
    source: str


class NoticeSource(Protocol):
    """Answers at once; None while nothing is announced. Never raises: no answer is no notice."""

    def poll(self) -> Interruption | None:
        """The notice that stands now, if any."""
        ...


class FileNotice:
    """A file holding {"deadline_s": number}: for bare metal, local runs and tests. Removed: withdrawn."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self) -> Interruption | None:
        """The file's notice; an unreadable file means that something is up, and leaves no time."""
        try:
            text = self._path.read_text()
        except OSError:
            return None
        try:
            deadline_s = float(json.loads(text)["deadline_s"])
        except (ValueError, KeyError, TypeError):
            deadline_s = 0.0
        return Interruption(max(deadline_s, 0.0), "file")


def announce(path: Path, deadline_s: float) -> None:
    """Write a notice file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".partial")
    draft.write_text(json.dumps({"deadline_s": deadline_s}))
    draft.replace(path)


class Watch:
    """Turns polls into news: each notice once, its withdrawal once."""

    def __init__(self, sources: list[NoticeSource]) -> None:
        self._sources = sources
        self._standing: Interruption | None = None

    def news(self) -> tuple[Interruption | None, bool]:
        """(a new notice or None, whether an earlier one was withdrawn)."""
        found = [notice for source in self._sources if (notice := source.poll())]
        first = min(found, key=lambda notice: notice.deadline_s, default=None)
        before, self._standing = self._standing, first
        if first is not None and first != before:
            return first, False
        return None, first is None and before is not None
