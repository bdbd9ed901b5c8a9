"""Two runs on one host beside a user's own Ray cluster, which the environment even points to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.runs import leftovers, start

from spotlight.runtime.ray_node import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

OPEN = {**os.environ, "RAY_AUTH_MODE": "disabled"}
LOOK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
print(json.dumps([sum(node["Alive"] for node in ray.nodes()), ray.cluster_resources().get("CPU"),
                  ray.get(ray.remote(lambda: "works").remote())]))
"""


@pytest.fixture
def theirs() -> Iterator[str]:
    """The address of a Ray cluster that is somebody else's."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="theirs-") as folder:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}",
                f"--temp-dir={folder}", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=OPEN,
        )  # fmt: skip
        yield f"127.0.0.1:{port}"
        process.terminate()
        process.wait(timeout=60)


def look(address: str) -> list[object]:
    """[living nodes, CPUs, whether a task runs] of a cluster, once it answers."""
    deadline = time.monotonic() + 120
    while True:
        command = [sys.executable, "-c", LOOK, address]
        done = subprocess.run(command, env=OPEN, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found: list[object] = json.loads(done.stdout.splitlines()[-1])
            return found
        assert time.monotonic() < deadline, done.stderr[-2000:]
        time.sleep(0.5)


def test_two_runs_and_a_strangers_cluster_leave_each_other_alone(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look(theirs) == [1, 1.0, "works"]
    monkeypatch.setenv("RAY_ADDRESS", theirs)
    names = ("one", "two")
    runs = [start(tmp_path, "--iterations", "2", "--spot", "1", "--name", name) for name in names]
    for name, process in zip(names, runs, strict=True):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        assert json.loads(out)["run"] == name
    monkeypatch.delenv("RAY_ADDRESS")
    assert look(theirs) == [1, 1.0, "works"]
    assert leftovers(tmp_path) == []
