"""`spotlight --help` is quick because it loads nothing heavy: checked by what is loaded, not by a clock."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "ray",
    "sky",
    "diffusers",
    "transformers",
    "boto3",
    "numpy",
    "onnxruntime",
    "peft",
    "PIL",
}

PROBE = """
import json, sys
from spotlight_cli.main import main
code = main({argv!r})
sys.stdout.flush()
print("\\n" + json.dumps([code, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def loaded(*argv: str) -> tuple[int, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(argv=list(argv))],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    code, names = json.loads(done.stdout.splitlines()[-1])
    return code, set(names)


@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["config", "--help"], ["nope"], ["status", "--help"]]
)
def test_help_loads_nothing_heavy(argv: list[str]) -> None:
    _, names = loaded(*argv)
    assert not names & HEAVY


@pytest.mark.parametrize(
    "argv", [["recipes"], ["config", "show"], ["doctor"], ["status", "x"], ["logs", "x"]]
)
def test_light_commands_load_no_engine(argv: list[str]) -> None:
    _, names = loaded(*argv)
    assert not names & {"torch", "ray", "sky", "diffusers", "transformers", "boto3"}
