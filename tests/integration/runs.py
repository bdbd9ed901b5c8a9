"""Small real runs for the tests: the shipped recipe, cut down to what shows the behaviour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

# Four prompts of eight samples: an iteration takes about two seconds.
SMALL = (
    "data.prompts_per_iteration=4",
    "data.group_size=8",
    "data.validation_size=8",
    "eval_every=100",
    "cluster.heartbeat_s=0.2",
    "cluster.dead_after_s=1.0",
    "cluster.respawn_s=0.5",
    "cluster.pull_batch=2",
)


def start(
    home: Path, *arguments: str, settings: Sequence[str] = SMALL, recipe: str = "tiny"
) -> subprocess.Popen[str]:
    """`spotlight train RECIPE ...` in its own process group."""
    sets = [part for setting in settings for part in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, "-m", "spotlight_cli.main", "--json", "train", recipe, *sets, *arguments],
        env={**os.environ, "SPOTLIGHT_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train(
    home: Path, *arguments: str, settings: Sequence[str] = SMALL, recipe: str = "tiny"
) -> dict[str, Any]:
    """Run to the end; the summary."""
    process = start(home, *arguments, settings=settings, recipe=recipe)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    summary: dict[str, Any] = json.loads(out)
    return summary


def wait_for(home: Path, run: str, kind: str, timeout_s: float = 150, **fields: Any) -> dict[str, Any]:
    """Wait until the run tells of an event with these fields."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for event in events(home, run):
            if event["kind"] == kind and all(event.get(name) == value for name, value in fields.items()):
                return event
        time.sleep(0.05)
    raise AssertionError(f"no {kind} {fields} within {timeout_s} s: {events(home, run)[-5:]}")


def events(home: Path, run: str) -> list[dict[str, Any]]:
    """What the run has told so far; a line that is still being written is left out."""
    path = home / "runs" / run / "progress.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def journal(home: Path, run: str) -> list[dict[str, Any]]:
    """All records of the run's journal."""
    paths = sorted((home / "runs" / run / "journal").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def losses(home: Path, run: str) -> list[float]:
    """The loss of every iteration, in order; of one that was done twice, the last."""
    path = home / "runs" / run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["iteration"]: row["loss"] for row in rows if row["kind"] == "iteration"}
    return [found[i] for i in sorted(found)]


def leftovers(home: Path) -> list[str]:
    """Processes that have this home in their environment and are not this test."""
    mark = f"SPOTLIGHT_HOME={home}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            own = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
            if not own and mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(f"{process.pid} {process.name()}")
        except (OSError, psutil.NoSuchProcess):
            continue
    return found
