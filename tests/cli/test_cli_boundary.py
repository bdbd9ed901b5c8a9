"""Errors become one line, a hint and an exit code; stdout stays clean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from spotlight import errors
from spotlight_cli import main as entry
from spotlight_cli.render import output


def tree(root: type[errors.SpotlightError]) -> Iterator[type[errors.SpotlightError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


OURS = sorted(
    {kind for kind in tree(errors.SpotlightError) if kind.__module__ == "spotlight.errors"},
    key=lambda k: k.__name__,
)


def raising(api: Any, error: BaseException) -> None:
    def fail() -> None:
        raise error

    api.before_end.append(fail)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_of_the_tree_has_its_exit_code_and_two_lines(run: Any, api: Any, kind: Any) -> None:
    raising(api, kind("spot pool is empty", hint="ask for less"))
    result = run("train", "--quiet")
    assert result.code == kind.exit_code
    assert result.out == ""
    assert result.err == f"error[{kind.code}]: spot pool is empty\nhint: ask for less\n"


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_json_errors_are_one_object_on_stderr(run: Any, api: Any, kind: Any) -> None:
    raising(api, kind("no\nluck \u2028", hint=None))
    result = run("train", "--json")
    assert (result.code, result.out) == (kind.exit_code, "")
    assert json.loads(result.err) == {
        "error": {"code": kind.code, "message": "no\nluck \u2028", "hint": None}
    }


def test_exit_codes_are_frozen() -> None:
    codes = {kind.code: kind.exit_code for kind in OURS}
    assert codes == {
        "internal": 1,
        "usage": 2,
        "config": 2,
        "data": 2,
        "precondition": 3,
        "capacity": 3,
        "quota": 3,
        "lock": 3,
        "credentials": 4,
        "not_found": 5,
        "run_failed": 6,
        "integrity": 6,
        "fenced": 6,
        "training": 6,
        "comm": 6,
        "budget": 7,
        "interrupted": 130,
    }
    for code in sorted(set(codes.values()) | {0}):
        assert f"{code} " in entry.EPILOG


def test_an_unexpected_exception_is_a_bug_in_one_line(run: Any, api: Any) -> None:
    raising(api, ZeroDivisionError("division by zero"))
    result = run("train", "-q")
    assert result.code == 1
    assert "error[internal]: ZeroDivisionError: division by zero" in result.err
    assert "this is a bug" in result.err
    assert "Traceback" not in result.err


def test_debug_shows_the_traceback_without_locals(run: Any, api: Any) -> None:
    secret_local = "canary-in-a-local-variable"

    def fail() -> None:
        hidden = secret_local
        raise ZeroDivisionError(len(hidden))

    api.before_end.append(fail)
    result = run("train", "-q", "--debug")
    assert "Traceback" in result.err
    assert "ZeroDivisionError" in result.err
    assert secret_local not in result.err


def test_debug_shows_the_traceback_of_an_expected_error(run: Any, api: Any) -> None:
    raising(api, errors.CapacityError("nothing"))
    assert "Traceback" in run("--debug", "train", "-q").err


def test_ctrl_c_is_130(run: Any, api: Any) -> None:
    raising(api, KeyboardInterrupt())
    result = run("train", "-q")
    assert result.code == 130
    assert result.err == "error[interrupted]: interrupted\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "--sopt", "2"], "--s"),
        (["train", "tiny", "extra"], "extra"),
        (["train", "--spot", "-1"], "--spot"),
        (["train", "--spot", "many"], "--spot"),
        (["sample", "only-a-run"], "PROMPT"),
        (["train", "--set", "iterationz=3"], "did you mean 'iterations'?"),
        (["train", "--set", "iterations"], "bad override"),
        (["train", "tinny"], "unknown recipe 'tinny'"),
        (["config"], "Missing command"),
        (["train", "--name", "../../x"], "bad run name"),
        (["train", "--name", "a; rm -rf ~"], "bad run name"),
        (["logs", "x\ny"], "bad run name"),
    ],
)
def test_wrong_usage_is_exit_2_and_writes_nothing(
    run: Any, spotlight_home: Any, line: list[str], says: str
) -> None:
    result = run(*line)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error[")
    assert says.lower() in result.err.lower()
    assert len(result.err.splitlines()) <= 6
    assert not spotlight_home.exists()
    as_json = run("--json", *line)
    assert as_json.out == ""
    assert json.loads(as_json.err)["error"]["code"] in ("usage", "config")


@pytest.mark.parametrize("line", [["status"], ["status", "nope"], ["logs", "nope"], ["report", "nope"]])
def test_what_is_not_there_is_exit_5(run: Any, line: list[str]) -> None:
    result = run(*line)
    assert (result.code, result.out) == (5, "")
    assert "error[not_found]: no run" in result.err


def test_global_flags_may_stand_anywhere(run: Any) -> None:
    assert entry.hoist(["train", "--json", "-q", "--", "--debug"]) == [
        "--json",
        "--quiet",
        "train",
        "--",
        "--debug",
    ]
    for line in (["--json", "recipes"], ["recipes", "--json"]):
        assert isinstance(run(*line).document, list)


def test_hostile_text_in_an_error_cannot_move_the_cursor(run: Any, api: Any) -> None:
    raising(api, errors.UserError("bad \x1b[2Jname\rok", hint="\x1b]0;title\x07"))
    result = run("train", "-q")
    assert "\x1b" not in result.err
    assert "\r" not in result.err


def test_a_long_error_is_cut_to_a_few_lines(run: Any, api: Any) -> None:
    raising(api, errors.UserError("\n".join("x" * 5000 for _ in range(100))))
    result = run("train", "-q")
    assert len(result.err.splitlines()) <= 5
    assert len(result.err) < 2500


def test_bare_command_shows_help(run: Any) -> None:
    result = run()
    assert result.code == 0
    assert "Usage: spotlight" in result.out


def test_version(run: Any) -> None:
    from spotlight import __version__

    assert run("--version").out.strip() == __version__


def test_no_color_by_environment(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run("recipes")
    assert output().color is False
