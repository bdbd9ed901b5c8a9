"""One model of a run, with the age of each fact."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from spotlight.errors import NotFoundError
from spotlight.observe import progress, status

STARTED = {"kind": "run_started", "at_s": 100.0, "run": "r", "iterations": 10}
NUMBERS = {"kind": "iteration", "at_s": 130.0, "iteration": 4, "reward_mean": 0.5, "wall_s": 7.0, "usd": 0.2}


def folder_with(tmp_path: Path, *events: dict[str, Any], name: str = "r") -> Path:
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    log = progress.ProgressLog(folder)
    for event in events:
        log(event)
    log.close()
    return folder


def test_each_fact_has_its_age(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        STARTED,
        {"kind": "eval", "at_s": 110.0, "iteration": 0, "score": 0.5},
        {"kind": "node", "at_s": 120.0, "node": "spot-0", "state": "lost", "why": "killed"},
        NUMBERS,
    )
    now = status.load(folder, 140.0)
    assert (now.state, now.iterations_done, now.iterations) == ("running", 5, 10)
    assert (now.started_age_s, now.score_age_s, now.numbers_age_s, now.seen_age_s) == (40.0, 30.0, 10.0, 10.0)
    assert (now.nodes[0].state, now.nodes[0].why, now.nodes[0].age_s) == ("lost", "killed", 20.0)
    assert now.eta_s == 35.0
    assert now.preemptions == 1
    assert [event.text for event in now.events][-1].startswith("iteration 4: reward 0.5")
    assert now.checkpoint_age_s is None


@pytest.mark.parametrize(
    ("events", "now_s", "state"),
    [
        ([], 0.0, "empty"),
        ([STARTED], 101.0, "running"),
        ([STARTED], 100.0 + status.SILENT_AFTER_S + 1, "silent"),
        ([STARTED, {"kind": "run_finished", "at_s": 101.0, "summary": {}}], 9e9, "finished"),
        ([STARTED, {"kind": "run_failed", "at_s": 101.0, "message": "m"}], 9e9, "failed"),
    ],
)
def test_states(tmp_path: Path, events: list[dict[str, Any]], now_s: float, state: str) -> None:
    assert status.load(folder_with(tmp_path, *events), now_s).state == state


def test_a_fact_from_the_future_is_fresh(tmp_path: Path) -> None:
    now = status.load(folder_with(tmp_path, STARTED, NUMBERS), 50.0)
    assert (now.seen_age_s, now.state) == (0.0, "running")


def test_the_document_is_json_and_says_the_same(tmp_path: Path) -> None:
    now = status.load(folder_with(tmp_path, STARTED, {**NUMBERS, "usd": float("nan")}), 140.0)
    document = json.loads(json.dumps(now.to_dict(), allow_nan=False))
    assert document["usd"] is None
    assert document["iterations_done"] == now.iterations_done
    assert set(document) == set(status.Status.__slots__)


def test_the_newest_run_is_the_one_last_heard_of(tmp_path: Path) -> None:
    old = folder_with(tmp_path, STARTED, name="old")
    new = folder_with(tmp_path, STARTED, name="new")
    os.utime(old / progress.FILE_NAME, (2e9, 2e9))
    assert status.newest(tmp_path) == old
    os.utime(new / progress.FILE_NAME, (3e9, 3e9))
    assert status.newest(tmp_path) == new


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run 'x'"):
        status.load(tmp_path / "x", 0.0)
    with pytest.raises(NotFoundError, match="yet"):
        status.newest(tmp_path)
