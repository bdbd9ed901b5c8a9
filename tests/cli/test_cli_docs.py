"""The page about the command line keeps up with the command line."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from spotlight import errors
from spotlight_cli.main import build

DOCS = (Path(__file__).resolve().parent.parent.parent / "docs" / "cli.md").read_text(encoding="utf-8")
DETAILED = ("train", "launch", "down", "sample", "export", "status", "logs", "report", "verify")


def test_every_command_is_on_the_page() -> None:
    for name in typer.main.get_command(build()).commands:  # type: ignore[attr-defined]
        assert re.search(rf"`spotlight {name}\b", DOCS), name


def test_every_flag_of_the_detailed_commands_is_on_the_page() -> None:
    commands = typer.main.get_command(build()).commands  # type: ignore[attr-defined]
    for name in DETAILED:
        section = DOCS.split(f"### `spotlight {name}")[1].split("\n##")[0]
        for parameter in commands[name].params:
            for flag in parameter.opts:
                assert not flag.startswith("--") or flag == "--help" or flag in section, f"{name} {flag}"


def test_every_error_code_is_on_the_page_with_its_exit_code() -> None:
    for kind in (
        k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.SpotlightError)
    ):
        assert re.search(rf"^\| {kind.exit_code} \|.*`{kind.code}`", DOCS, re.MULTILINE), kind.code
