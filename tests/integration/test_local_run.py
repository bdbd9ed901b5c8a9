"""`spotlight train` as a user runs it: real Ray, real model, real reward, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from integration.runs import SMALL, events, journal, leftovers, losses, start, train, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

FIXED = (*SMALL, "explore.fixed_drafts=6")  # as many drafts as wanted, waited for: no clock in the choice


@pytest.fixture(scope="module")
def lost_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six iterations that loses a spot node without notice, with all that it left."""
    home = tmp_path_factory.mktemp("lost")
    trace = home / "trace.csv"
    trace.write_text("time,node,notice_s\nit2+0.2,s0,0\n")
    arguments = ("--iterations", "6", "--spot", "1", "--preempt", str(trace), "--name", "run")
    train(home, *arguments, "--set", "cluster.start_with=1")
    return home


def summary(home: Path) -> dict[str, Any]:
    """summary.json."""
    found: dict[str, Any] = json.loads((home / "runs" / "run" / "summary.json").read_text())
    return found


def test_a_run_that_loses_a_node_ends_with_every_group_complete(lost_node: Path) -> None:
    trained = [
        command["request"]
        for record in journal(lost_node, "run")
        if record["type"] == "on"
        for command in record["commands"]
        if command["type"] == "Accepted" and command["request"].startswith("final/")
    ]
    assert max(Counter(trained).values()) == 1
    groups = Counter(tuple(request.split("/")[1:3]) for request in trained)
    assert len(groups) == 6 * 4
    assert set(groups.values()) == {8}
    assert summary(lost_node)["samples_lost"] == 0


def test_the_lost_node_is_told_of_and_comes_back(lost_node: Path) -> None:
    states = [e["state"] for e in events(lost_node, "run") if e["kind"] == "node" and e["node"] == "s0"]
    assert "lost" in states
    assert states.index("lost") < len(states) - 1
    assert summary(lost_node)["preemptions"] == 1


def test_drafts_for_the_next_batch_are_made_while_this_one_is_trained(lost_node: Path) -> None:
    """By the journal alone: draft leases that begin and end between the two marks of a training phase."""
    inside, open_since, iteration = 0, None, None
    begun: dict[int, dict[str, Any]] = {}
    for record in journal(lost_node, "run"):
        if record["type"] == "phase" and record["phase"] == "train":
            open_since = record["now"] if record["state"] == "begin" else None
            iteration = record["iteration"]
            begun.clear()
        for command in record.get("commands", ()):
            if command["type"] == "Grant" and command["request"]["kind"] == "draft" and open_since:
                begun[command["token"]] = command
            if command["type"] == "Accepted" and command["token"] in begun and open_since:
                assert begun[command["token"]]["request"]["sample"].startswith(f"it{iteration + 1}/")
                assert begun[command["token"]]["version"] == iteration
                inside += 1
    assert inside > 0
    assert inside == summary(lost_node)["drafts_in_training"]


def test_the_journal_of_the_run_keeps_every_invariant_and_replays(lost_node: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spotlight_cli.main", "--json", "verify", "run", "--replay"],
        env={**os.environ, "SPOTLIGHT_HOME": str(lost_node)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    assert {v["name"].split()[0] for v in verdicts} >= {f"INV-{n}" for n in range(1, 6)}


def test_a_run_leaves_what_it_promises_and_nothing_alive(lost_node: Path) -> None:
    folder = lost_node / "runs" / "run"
    assert {
        "score_base", "score_final", "iterations", "drafts", "spot_busy_share", "preemptions",
        "samples_moved", "samples_lost", "usd_estimate", "wall_s",
    } <= summary(lost_node).keys()  # fmt: skip
    for name in ("config.yaml", "metrics.jsonl", "samples/it00000.png", "samples/it00006.png", "export"):
        assert (folder / name).exists(), name
    assert list((folder / "tensorboard").iterdir())
    assert leftovers(lost_node) == []


def test_sample_draws_with_the_result(lost_node: Path, tmp_path: Path) -> None:
    picture = tmp_path / "482.png"
    done = subprocess.run(
        [sys.executable, "-m", "spotlight_cli.main", "sample", "run", "482", "--out", str(picture)],
        env={**os.environ, "SPOTLIGHT_HOME": str(lost_node)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four undisturbed iterations with a fixed number of drafts."""
    home = tmp_path_factory.mktemp("reference")
    train(
        home,
        "--iterations",
        "4",
        "--spot",
        "1",
        "--name",
        "run",
        "--set",
        "checkpoint_every=2",
        settings=FIXED,
    )
    return home


def test_equal_seeds_give_equal_losses(reference: Path, tmp_path: Path) -> None:
    train(
        tmp_path,
        "--iterations",
        "4",
        "--spot",
        "1",
        "--name",
        "run",
        "--set",
        "checkpoint_every=2",
        settings=FIXED,
    )
    assert losses(tmp_path, "run") == losses(reference, "run")
    assert len(set(losses(reference, "run"))) == 4


def test_a_killed_run_resumes_to_the_same_losses(reference: Path, tmp_path: Path) -> None:
    arguments = ("--iterations", "4", "--spot", "1", "--name", "run", "--set", "checkpoint_every=2")
    process = start(tmp_path, *arguments, settings=FIXED)
    wait_for(tmp_path, "run", "checkpoint", iteration=2)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    _gone(tmp_path)
    resumed = train(tmp_path, *arguments, "--resume", settings=FIXED)
    assert losses(tmp_path, "run") == losses(reference, "run")
    assert resumed["score_final"] == summary(reference)["score_final"]


def test_resuming_with_another_seed_is_refused(reference: Path) -> None:
    process = start(
        reference, "--iterations", "4", "--seed", "9", "--name", "run", "--resume", settings=FIXED
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "seed" in err


@pytest.mark.parametrize(
    ("number", "twice"), [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)]
)
def test_ctrl_c_and_sigterm_leave_nothing_behind(tmp_path: Path, number: int, twice: bool) -> None:
    process = start(tmp_path, "--iterations", "50", "--spot", "1", "--name", "run")
    wait_for(tmp_path, "run", "node", node="od0", state="ready")
    os.kill(process.pid, number)
    if twice:
        time.sleep(0.2)
        os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "SIGTERM" not in err
    assert leftovers(tmp_path) == []


def test_a_model_that_cannot_be_loaded_is_told_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    process = start(
        tmp_path, "--spot", "0", "--name", "run", "--set", f"model.path={tmp_path / 'model'}", settings=()
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (5, ""), err
    error = json.loads(err.splitlines()[-1])["error"]
    assert (error["code"], error["hint"]) == ("not_found", "see model.path")
    assert error["message"].startswith(f"no tiny checkpoint: {tmp_path / 'model'}")
    assert leftovers(tmp_path) == []


def test_without_spot_nodes_it_explores_nothing_and_says_so(tmp_path: Path) -> None:
    found = train(tmp_path, "--iterations", "2", "--spot", "0", "--name", "run")
    assert found["drafts"] == 0
    assert found["spot_busy_share"] is None
    started = next(e for e in events(tmp_path, "run") if e["kind"] == "run_started")
    assert started["exploration"].startswith("off")


def _gone(home: Path) -> None:
    deadline = time.monotonic() + 30
    while leftovers(home) and time.monotonic() < deadline:
        psutil.wait_procs([], timeout=0.1)
    assert leftovers(home) == []
