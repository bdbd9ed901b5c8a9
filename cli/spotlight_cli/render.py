"""Everything that reaches a terminal. Rich is imported here and in `live`, and only once something is shown.

Data goes to stdout, words for people to stderr. Under `--json` stdout holds one document or nothing, and no
stream carries colours or spinners. Foreign text is printed literally: no markup, no control characters.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotlight.errors import SpotlightError
from spotlight.observe.words import clean

if TYPE_CHECKING:
    from rich.console import Console

MAX_ERROR_LINES = 5


@dataclass(slots=True)
class Output:
    """The choices of the command line that shape what is printed."""

    json: bool = False
    quiet: bool = False
    debug: bool = False
    color: bool = True

    @property
    def live(self) -> bool:
        """Whether a person watches: a capable terminal on stderr, and neither --json nor --quiet."""
        return not self.json and not self.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def console(self, *, stderr: bool = False) -> Console:
        """A rich console on stdout or stderr that prints strings as they are."""
        from rich.console import Console

        return Console(
            stderr=stderr,
            no_color=True if not self.color else None,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=True,
        )

    def document(self, value: Any) -> None:
        """Print the one JSON document of a `--json` command."""
        sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False, default=str) + "\n")

    def line(self, text: str) -> None:
        """Print one line of data on stdout, as it is."""
        sys.stdout.write(text + "\n")

    def say(self, text: str, *, style: str = "") -> None:
        """Tell a person something, on stderr."""
        if self.quiet or self.json:
            return
        if self.live and style and self.color:
            self.console(stderr=True).print(text, style=style)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table on stdout: coloured heads on a terminal, plain aligned columns elsewhere."""
        cells = [[clean(cell, 200) for cell in row] for row in rows]
        if not sys.stdout.isatty():
            widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
            for row in [list(columns), *cells]:
                text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                self.line(text.rstrip())
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in cells:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        self.console().print(table)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print labels and values on stdout, aligned."""
        width = max((len(label) for label, _ in rows), default=0)
        for label, value in rows:
            self.line(f"  {label.ljust(width)}  {value}")

    def next_steps(self, commands: Sequence[str]) -> None:
        """Name at most three commands that follow, to a person at a terminal only."""
        if self.live and sys.stdout.isatty():
            self.say("\nnext:")
            for command in commands[:3]:
                self.say(f"  {command}", style="cyan")

    def error(self, error: SpotlightError) -> None:
        """Print one error: two lines for a person, one object under --json. Stdout stays as it is."""
        if self.json:
            body = {"code": error.code, "message": error.message, "hint": error.hint}
            sys.stderr.write(json.dumps({"error": body}, ensure_ascii=False) + "\n")
            return
        lines = [clean(line) for line in error.message.splitlines()[:MAX_ERROR_LINES]] or [""]
        head = f"error[{error.code}]: {lines[0]}"
        text = "\n".join([head, *(f"  {line}" for line in lines[1:])])
        hint = f"\nhint: {clean(error.hint)}" if error.hint else ""
        if sys.stderr.isatty() and self.color:
            self.console(stderr=True).print(text, style="bold red")
            if hint:
                self.console(stderr=True).print(hint.lstrip("\n"), style="yellow")
        else:
            sys.stderr.write(f"{text}{hint}\n")


# A state has one colour everywhere; gold for what a preemptible world brings.
STYLES = {
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "ready": "green",
    "back": "green",
    "joining": "blue",
    "notice": "yellow",
    "lost": "red",
    "running": "green",
    "silent": "yellow",
    "finished": "green",
    "failed": "bold red",
}

_current = Output()


def output() -> Output:
    """The output of the running command."""
    return _current


def configure(*, json: bool, quiet: bool, debug: bool, no_color: bool) -> Output:
    """Set the output from the global options; NO_COLOR in the environment counts as --no-color."""
    global _current
    color = not (no_color or json or os.environ.get("NO_COLOR"))
    _current = Output(json=json, quiet=quiet, debug=debug, color=color)
    for stream in (sys.stdout, sys.stderr):
        # A narrow encoding must not turn an arrow into a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    return _current
