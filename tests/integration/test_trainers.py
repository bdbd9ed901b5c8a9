"""A run whose training is shared by two processes: equal to one, resumed by another number, ended by a lost one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from integration.runs import SMALL, leftovers, losses, start, train, wait_for

from spotlight.store import checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

# Sums over processes round differently, and what one iteration makes of it the next one draws with: measured, the
# losses differ by up to 4e-8 after four iterations, while they are 1e-5 to 1e-4 themselves.
TOLERANCE = 1e-6
SETTINGS = (*SMALL, "explore.fixed_drafts=6", "checkpoint_every=2")
TWO = ("--set", "cluster.trainers=2")
LORA = ("--set", "train.mode=lora", "--set", "algorithm.kind=nft", "--set", "sampler.kind=ode")


def arguments(iterations: int, *more: str) -> tuple[str, ...]:
    return ("--iterations", str(iterations), "--spot", "1", "--name", "run", *more)


def trainers(home: Path) -> Iterator[psutil.Process]:
    """The training processes of the run in this home, by the name that Ray gives them."""
    mark = f"SPOTLIGHT_HOME={home}".encode()
    for process in psutil.process_iter():
        try:
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes() and process.name().startswith(
                "ray::TrainerAct"
            ):
                yield process
        except (OSError, psutil.NoSuchProcess):
            continue


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A test that fails leaves no run."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations of one process."""
    home = tmp_path_factory.mktemp("one")
    train(home, *arguments(4), settings=SETTINGS)
    return home


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two processes, as far as iteration 2."""
    home = tmp_path_factory.mktemp("two")
    train(home, *arguments(2, *TWO), settings=SETTINGS)
    return home


def scores(home: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((home / "runs" / "run" / "summary.json").read_text())["scores"]
    return found


def test_two_processes_learn_what_one_does(one: Path, two: Path) -> None:
    assert losses(two, "run") == pytest.approx(losses(one, "run")[:2], abs=TOLERANCE)
    assert scores(two)["0"] == scores(one)["0"]  # the base model, its prompts shared out
    assert (two / "runs" / "run" / "export").is_dir()  # which compares itself with what was trained
    assert leftovers(two) == []


def test_another_number_goes_on_from_a_checkpoint(one: Path, two: Path) -> None:
    """Saved by two, resumed by one, whose checkpoint two go on from."""
    folder = two / "runs" / "run"
    train(two, *arguments(3, "--resume"), settings=SETTINGS)
    assert checkpoint.load_latest(folder / "checkpoints").step == 3
    train(two, *arguments(4, "--resume", *TWO), settings=SETTINGS)
    assert losses(two, "run") == pytest.approx(losses(one, "run"), abs=TOLERANCE)
    assert scores(two)["4"] == pytest.approx(scores(one)["4"], abs=1e-3)


def test_adapters_and_old_weights_are_shared_too(tmp_path: Path) -> None:
    found = {}
    for number in (1, 2):
        home = tmp_path / str(number)
        train(home, *arguments(2, *LORA, "--set", f"cluster.trainers={number}"), settings=SETTINGS)
        found[number] = losses(home, "run")
    assert found[2] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_process_ends_the_run_at_once_and_says_how_to_go_on(tmp_path: Path, rank: int) -> None:
    settings = (*SETTINGS, "checkpoint_every=1")
    with ended(start(tmp_path, *arguments(50, *TWO), settings=settings)) as process:
        wait_for(tmp_path, "run", "checkpoint", 300, iteration=1)
        wait_for(tmp_path, "run", "phase", 300, phase="train", iteration=1)
        found = sorted(trainers(tmp_path), key=lambda each: each.pid)
        assert len(found) == 2
        found[rank].send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 6, err
    error = json.loads(err.splitlines()[-1])["error"]
    assert error["code"] == "comm"
    assert "training process" in error["message"]
    assert "of 2 on od0 ended" in error["message"]
    assert "--resume --name run" in error["hint"]
    assert leftovers(tmp_path) == []
    train(tmp_path, *arguments(2, *TWO, "--resume"), settings=settings)
    assert len(losses(tmp_path, "run")) == 2


def test_ctrl_c_ends_both(tmp_path: Path) -> None:
    with ended(start(tmp_path, *arguments(50, *TWO), settings=SETTINGS)) as process:
        wait_for(tmp_path, "run", "phase", 300, phase="train", iteration=0)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert out == ""
    assert leftovers(tmp_path) == []
