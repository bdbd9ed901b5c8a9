"""At a real pseudo-terminal: the live view, Ctrl-C, colours; and real streams beside it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

PROGRAM = Path(__file__).resolve().parent.parent / "fakes" / "run_cli.py"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


def environment(home: Path, **extra: str) -> Any:
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI", "COLUMNS", "FORCE_COLOR")}
    return {**inherited, "SPOTLIGHT_HOME": str(home), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **extra}


def terminal(home: Path, *arguments: str, **extra: str) -> Any:
    return pexpect.spawn(
        sys.executable, [str(PROGRAM), *arguments], env=environment(home, **extra), encoding="utf-8",
        timeout=40, dimensions=(40, 120),
    )  # fmt: skip


def test_live_view_on_a_terminal(spotlight_home: Path) -> None:
    child = terminal(spotlight_home, "train", "--iterations", "3", FAKE_PAUSE_S="0.1")
    child.expect(pexpect.EOF)
    child.close()
    raw = child.before
    text = ESCAPE.sub("", raw)
    assert child.exitstatus == 0, text
    assert "\x1b[" in raw
    # The panel: phases, score with its course, nodes, money.
    assert "▸" in text
    assert re.search(r"score\s+0\.59 → 0\.[67]\d\s+[▁-█]+", text)
    assert "● spot-0" in text
    assert "$0.0100 so far" in text
    # What must not be lost when the panel is gone: nodes, scores, warnings, the summary, what to do next.
    assert "node spot-0 lost: killed without notice" in text
    assert "held-out score          " in text
    assert text.index("next:") < text.index("spotlight report tiny")
    assert text.count("  spotlight ") == 3
    # The cursor is given back, and foreign escape sequences were not printed.
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")
    assert "\x1b[31m<script>" not in raw
    assert "[bold]" in text


def test_ctrl_c_at_a_terminal(spotlight_home: Path) -> None:
    child = terminal(spotlight_home, "train", "--iterations", "3", FAKE_PAUSE_S="1.0")
    child.expect("node head is ready")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert "error[interrupted]: interrupted" in ESCAPE.sub("", child.before)
    assert "Traceback" not in child.before


def test_json_on_a_terminal_has_no_escape_at_all(spotlight_home: Path) -> None:
    child = terminal(spotlight_home, "train", "--json", "--iterations", "1")
    child.expect(pexpect.EOF)
    child.close()
    assert "\x1b" not in child.before
    assert json.loads(child.before)["score_final"] == 0.83


@pytest.mark.parametrize("extra", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["no-color", "dumb"])
def test_errors_without_colour(spotlight_home: Path, extra: dict[str, str]) -> None:
    child = terminal(spotlight_home, "train", "tinny", **extra)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 2
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", child.before)


def process(home: Path, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments], env=environment(home, **extra), text=True,
        encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_run_tidily(spotlight_home: Path, number: signal.Signals) -> None:
    child = process(spotlight_home, "train", "--iterations", "3", FAKE_PAUSE_S="1.0")
    assert child.stderr is not None
    while "head is ready" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "error[interrupted]: interrupted"


def test_a_reader_that_goes_away_is_no_traceback(spotlight_home: Path) -> None:
    child = process(spotlight_home, "config", "schema")
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert "Traceback" not in child.stderr.read()
    child.wait(30)


def test_a_narrow_encoding_does_not_crash(spotlight_home: Path) -> None:
    child = process(spotlight_home, "train", "--iterations", "1", PYTHONIOENCODING="ascii")
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert "0.59 ? 0.83" in out
