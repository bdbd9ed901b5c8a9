"""Where the repository is and what is in it, for the style tests."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PRODUCT = ("spotlight", "cli/spotlight_cli")


def modules(*folders: str) -> list[Path]:
    """Python files below the given folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    """The path as the repository names it."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    """The parsed module."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def tracked_text() -> dict[str, str]:
    """Every tracked text file, by name. Outside a git checkout: every file of the source folders."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    names = [name for name in done.stdout.split("\0") if name]
    if done.returncode or not names:
        folders = ("spotlight", "cli", "sky", "tests", "docs", "benchmarks")
        names = [
            relative(path) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()
        ]
    texts = {}
    for name in names:
        try:
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a picture, a checkpoint, or removed in the working tree
    return texts
