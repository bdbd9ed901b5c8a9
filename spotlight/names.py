"""Names that reach file systems, clouds and shells. Whatever passes here is safe in all three."""

from __future__ import annotations

import os
import re
from pathlib import Path

from spotlight.errors import UserError

# GCP allows 35 characters in a cluster name; `spotlight-<run>-s999` must fit beside the user's hash.
_RUN_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,22}[a-z0-9])?")


def run_name(value: str) -> str:
    """Return `value` if it is a run name: 1-24 of a-z, 0-9 and '-', first a letter, last no '-'.

    Raises UserError otherwise. `fullmatch`, so a trailing newline is refused too.
    """
    if not _RUN_NAME.fullmatch(value):
        raise UserError(
            f"bad run name {value[:60]!r}",
            hint="1-24 characters of a-z, 0-9 and '-', starting with a letter, not ending in '-'",
        )
    return value


def home() -> Path:
    """The folder that holds all runs: $SPOTLIGHT_HOME, else ~/.spotlight."""
    return Path(os.environ.get("SPOTLIGHT_HOME") or Path.home() / ".spotlight").expanduser()


def run_dir(name: str) -> Path:
    """The folder of one run. Raises UserError on a bad name; the folder need not exist."""
    return home() / "runs" / run_name(name)


def inside(root: Path, relative: str) -> Path:
    """Join and check that the result stays inside `root`, symbolic links followed. Raises UserError."""
    path = (root / relative).resolve()
    if not path.is_relative_to(root.resolve()):
        raise UserError(f"path {relative[:80]!r} leaves {root}")
    return path
