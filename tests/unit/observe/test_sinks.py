"""No sink can hold up a run, and the numbers arrive."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spotlight.observe import jsonl, metrics
from spotlight.observe.sinks import Background, TensorBoardSink, numbers


class Collecting:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.closed = False

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True

    def abandon(self) -> None:
        raise AssertionError("must not be abandoned")


class Hanging(Collecting):
    """Blocks in its first write until it is abandoned."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def write(self, record: Mapping[str, Any]) -> None:
        self.entered.set()
        self.release.wait()
        super().write(record)

    def abandon(self) -> None:
        self.release.set()


class Failing(Collecting):
    """Fails always."""

    def write(self, record: Mapping[str, Any]) -> None:
        super().write(record)
        raise ConnectionError("no route")


def row(i: int) -> dict[str, Any]:
    return {"at_s": 1000.0 + i, "kind": "iteration", "iteration": i, "reward_mean": i / 10, "note": "text"}


def test_everything_arrives_in_order_before_close_returns() -> None:
    sink = Collecting()
    background = Background("x", lambda: sink, capacity=1000)
    for i in range(500):
        background.write(row(i))
    assert background.close(30) == []
    assert [record["iteration"] for record in sink.records] == list(range(500))
    assert sink.closed


def test_a_hanging_sink_drops_the_oldest_and_is_left_behind() -> None:
    sink = Hanging()
    background = Background("slow", lambda: sink, capacity=10)
    background.write(row(0))
    assert sink.entered.wait(30)
    for i in range(1, 31):
        background.write(row(i))  # returns although the sink hangs
    assert background.dropped == 20
    problems = background.close(0.05)
    assert problems == ["slow: still busy after 0.05 s, left behind", "slow: 20 records dropped"]
    background._thread.join(30)
    assert [record["iteration"] for record in sink.records] == [0, *range(21, 31)]


def test_a_failing_sink_is_given_up_after_three_errors() -> None:
    sink = Failing()
    background = Background("bad", lambda: sink)
    for i in range(10):
        background.write(row(i))
    assert background.close(30) == ["bad: 7 records dropped", "bad: ConnectionError: no route"]
    assert len(sink.records) == 3


def test_a_sink_that_cannot_be_opened_is_said() -> None:
    def refuse() -> Collecting:
        raise PermissionError("read-only")

    background = Background("tb", refuse)
    background.write(row(0))
    assert background.close(30) == ["tb: 1 records dropped", "tb: PermissionError: read-only"]


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    for i in range(3):
        sink.write(row(i))
    sink.write({"at_s": 1.0, "kind": "eval", "iteration": 2, "score": 0.75, "exact": None})
    sink.close()
    seen = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(seen.Tags()["scalars"]) == ["eval/score", "iteration/reward_mean"]
    scalars = seen.Scalars("iteration/reward_mean")
    assert [(s.step, s.wall_time, round(s.value, 4)) for s in scalars] == [
        (0, 1000, 0),
        (1, 1001, 0.1),
        (2, 1002, 0.2),
    ]
    assert seen.Scalars("eval/score")[0].value == 0.75


def test_tensorboard_files_of_a_killed_run_are_whole_up_to_the_last_write(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(row(1))  # never closed
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("iteration/reward_mean")[0].step == 1


def test_observe_needs_no_engine(tmp_path: Path) -> None:
    probe = (
        "import sys, pathlib\n"
        "from spotlight.observe.sinks import TensorBoardSink\n"
        "from spotlight.observe import report, status, grids, metrics\n"
        f"TensorBoardSink(pathlib.Path({str(tmp_path)!r})).write({row(0)!r})\n"
        "print(sorted({'torch', 'tensorflow', 'ray', 'rich', 'typer', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == "[]"


def test_numbers_are_those_with_a_name_of_their_own() -> None:
    record = {"at_s": 1.0, "kind": "k", "iteration": 1, "a": 2, "b": True, "c": "x", "d": None}
    assert numbers(record) == {"a": 2, "b": 1}


def test_the_truth_is_written_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    recorder = metrics.open_recorder(tmp_path, run="r", config={})
    values = {"loss": float("nan"), "reward_mean": 0.5, "note": "canary-0123456789"}
    recorder.record("iteration", 1, values, at_s=7.0)
    assert metrics.read(tmp_path) == [
        {
            "at_s": 7.0,
            "kind": "iteration",
            "iteration": 1,
            "loss": None,
            "reward_mean": 0.5,
            "note": "[redacted]",
        }
    ]
    assert recorder.close(30) == []
    seen = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert seen.Scalars("iteration/reward_mean")[0].value == 0.5


def test_a_recorder_over_a_dead_disk_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = metrics.Recorder(jsonl.JsonLines(tmp_path / "file" / "m.jsonl"))
    recorder.record("eval", 0, {"score": 1.0}, at_s=0.0)
    [problem] = recorder.close()
    assert problem.startswith("1 metric records lost: m.jsonl: ")


def test_metric_names_are_documented() -> None:
    for name, metric in metrics.METRICS.items():
        assert name.isidentifier()
        assert metric.unit
        assert metric.help
