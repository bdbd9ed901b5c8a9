"""Verdicts on a run from its journal alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spotlight.core import history
from spotlight.core.history_nodes import NodeHistory
from spotlight.core.replay import replay as replay_records
from spotlight.core.verdict import Verdict
from spotlight.observe import journal


def verify(folder: Path) -> list[Verdict]:
    """INV-1 to INV-7, in order. Raises NotFoundError without a journal, DataError if it cannot be read."""
    nodes = NodeHistory()

    def records() -> Iterator[dict[str, Any]]:
        for record in journal.read(folder):
            nodes.see(record)
            yield record

    return [*history.check(records()), *nodes.verdicts()]


def replay(folder: Path) -> Verdict:
    """Whether the journal's events give the same commands again. Raises as `verify` does."""
    return replay_records(journal.read(folder))
