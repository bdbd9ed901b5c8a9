"""The flags of the command line, frozen: a change here is a decision, not an accident."""

from __future__ import annotations

from typing import Any

import typer.main

from spotlight_cli.main import build

MAX_FLAGS = 12
FLAGS = {
    "": "--debug --json --no-color --quiet --version -q",
    "train": "--iterations --name --preempt --resume --seed --set --spot",
    "launch": (
        "--budget-usd --dry-run --gpus --image --infra --max-hours --name --set --spot-ratio --store --yes -y"
    ),
    "down": "",
    "sample": "--out --seed -o",
    "export": "--checkpoint --ema --live --merged --out --push -o",
    "serve-reward": "--host --port",
    "status": "--watch -w",
    "logs": "--follow --lines -f -n",
    "report": "--out -o",
    "verify": "--replay",
    "recipes": "",
    "config show": "--set",
    "config schema": "",
    "doctor": "--cloud --gpus",
}


def flags(command: Any) -> list[str]:
    names = [
        name for p in command.params if p.param_type_name == "option" for name in p.opts + p.secondary_opts
    ]
    return sorted(name for name in names if "completion" not in name and name not in ("--help", "-h"))


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        path = f"{prefix} {name}".strip()
        found.update(commands(command, path) if hasattr(command, "commands") else {path: command})
    return found


def test_flags_are_frozen() -> None:
    root = typer.main.get_command(build())
    actual = {"": " ".join(flags(root)), **{k: " ".join(flags(v)) for k, v in commands(root).items()}}
    assert {k: v for k, v in actual.items() if k in FLAGS} == FLAGS


def test_no_command_has_an_option_jungle() -> None:
    for path, command in commands(typer.main.get_command(build())).items():
        assert len([p for p in command.params if p.param_type_name == "option"]) <= MAX_FLAGS, path


def test_every_command_and_option_explains_itself() -> None:
    for path, command in commands(typer.main.get_command(build())).items():
        assert command.help, path
        for parameter in command.params:
            assert parameter.help or parameter.name == "help", f"{path} {parameter.name}"


def test_no_command_takes_a_global_flag_for_itself() -> None:
    for path, command in commands(typer.main.get_command(build())).items():
        taken = {"--json", "--quiet", "-q", "--debug", "--no-color"} & set(flags(command))
        assert not taken, f"{path} redefines {taken}"


def test_locals_are_never_shown() -> None:
    assert build().pretty_exceptions_show_locals is False
    assert build().pretty_exceptions_enable is False
