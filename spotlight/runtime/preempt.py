"""A preemption trace for local runs: which spot node is taken when, and with how much notice.

    time,node,notice_s
    12.5,s0,0          seconds after the first iteration began
    it10+0.5,s1,2      half a second into iteration 10, announced two seconds before
    it12,s0,-30        a false alarm: announced 30 seconds ahead, and nothing happens

`demo` is a built-in trace: one node lost without notice at a third of the run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spotlight.errors import DataError

HEADER = ["time", "node", "notice_s"]
MAX_LINES = 100_000
_SECONDS = r"\d{1,9}(?:\.\d{1,9})?"
_TIME = re.compile(rf"(?P<plain>{_SECONDS})|it(?P<iteration>\d{{1,9}})(?:\+(?P<after>{_SECONDS}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Preemption:
    """`after_s` seconds into `iteration`. `notice_s` > 0: announced so long before the end; < 0: a false alarm."""

    iteration: int
    after_s: float
    node: str
    notice_s: float

    @property
    def false_alarm(self) -> bool:
        """Whether the node stays."""
        return self.notice_s < 0


def load(source: str | None, *, iterations: int, nodes: Sequence[str]) -> list[Preemption]:
    """Read a trace file, `demo` or `none`, in the order of its lines. Raises DataError with file and line."""
    if source in (None, "none"):
        return []
    if source == "demo":
        return [Preemption(max(iterations // 3, 1), 0.5, nodes[-1], 0.0)] if nodes else []
    path = Path(str(source))
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror})", hint="a CSV file, `demo` or `none`"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from None
    lines = {number: line for number, line in enumerate(text.splitlines(), 1) if line.strip(" ,")}
    rows = {number: [cell.strip() for cell in line.split(",")] for number, line in lines.items()}
    if rows.pop(min(rows, default=1), None) != HEADER:
        raise DataError(f"{path}:1: the first line must be {','.join(HEADER)}")
    if len(rows) > MAX_LINES:
        raise DataError(f"{path}: more than {MAX_LINES} lines")
    return [_parse(row, f"{path}:{number}", nodes) for number, row in rows.items()]


def _parse(row: Sequence[str], where: str, nodes: Sequence[str]) -> Preemption:
    if len(row) != len(HEADER):
        raise DataError(f"{where}: {len(row)} fields, {len(HEADER)} are wanted")
    time, node, notice = row
    match = _TIME.fullmatch(time)
    if not match:
        raise DataError(f"{where}: bad time {time[:30]!r}", hint="seconds, itN or itN+seconds")
    if node not in nodes:
        raise DataError(
            f"{where}: no spot node {node[:30]!r}", hint=f"there are: {', '.join(nodes) or 'none'}"
        )
    try:
        notice_s = float(notice or 0)
    except ValueError:
        raise DataError(f"{where}: bad notice_s {notice[:30]!r}") from None
    if not abs(notice_s) <= 86_400:
        raise DataError(f"{where}: notice_s {notice[:30]!r} is not within a day")
    return Preemption(
        int(match["iteration"] or 0), float(match["plain"] or match["after"] or 0), node, notice_s
    )
