"""W&B can neither ask, nor hang, nor be left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotlight.observe import wandb_child
from spotlight.observe.sinks import Background, WandbSink

ROW = {"at_s": 1.0, "kind": "iteration", "iteration": 3, "reward_mean": 0.3}
FAKE_WANDB = """
import json, os, sys, time

class Settings:
    def __init__(self, **given): self.given = given

class Run:
    def __init__(self, out): self.out = out
    def log(self, values, step): self.put({"step": step, **values})
    def finish(self): self.put("finish"); HANG_AT_FINISH and time.sleep(600)
    def put(self, value): self.out.write(json.dumps(value) + "\\n"); self.out.flush()

HANG_AT_FINISH = bool(os.environ.get("FAKE_WANDB_HANG"))

def init(dir, project, name, config, mode, settings):
    run = Run(open(os.path.join(dir, "wandb.log"), "a"))
    run.put({"project": project, "name": name, "config": config, "mode": mode, "tty": sys.stdin.isatty()})
    return run
"""


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `wandb` package on the child's path that writes down what it is told."""
    package = tmp_path / "site"
    package.mkdir()
    (package / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def told(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "wandb.log").read_text().splitlines()]


def test_without_a_key_it_stays_offline_and_cannot_ask(fake_wandb: Path) -> None:
    sink = WandbSink(fake_wandb, "project", "run", {"seed": 1}, finish_s=30)
    sink.write(ROW)
    sink.close()
    assert told(fake_wandb) == [
        {"project": "project", "name": "run", "config": {"seed": 1}, "mode": "offline", "tty": False},
        {"step": 3, "iteration/reward_mean": 0.3},
        "finish",
    ]


def test_it_goes_online_with_a_key_only(fake_wandb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_child.mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_child.mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_child.mode() == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    (fake_wandb / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password abcdef\n")
    (fake_wandb / ".netrc").chmod(0o600)
    assert wandb_child.mode() == "online"
    (fake_wandb / ".netrc").write_text("nonsense {{{")
    assert wandb_child.mode() == "offline"


def test_one_that_hangs_at_the_end_is_ended(fake_wandb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WANDB_HANG", "1")
    sink = WandbSink(fake_wandb, "p", "r", {}, finish_s=3.0)
    with pytest.raises(RuntimeError, match="did not finish in time"):
        sink.close()
    assert sink._child.poll() is not None


def test_abandoning_it_leaves_no_process(fake_wandb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WANDB_HANG", "1")
    made: list[WandbSink] = []

    def make() -> WandbSink:
        made.append(WandbSink(fake_wandb, "p", "r", {}, finish_s=600))
        return made[0]

    background = Background("wandb", make)
    background.write(ROW)
    assert any("left behind" in problem for problem in background.close(2.0))
    made[0]._child.wait(30)
    background._thread.join(30)
    assert not background._thread.is_alive()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('no wandb')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    background = Background("wandb", lambda: WandbSink(tmp_path, "p", "r", {}, finish_s=30))
    assert background.close(40) == [
        "wandb: RuntimeError: the wandb package is not installed; add the extra `wandb`"
    ]
