"""A local node is a machine: whatever it started ends with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from spotlight.provision.base import NodeSpec, NodeState, Role
from spotlight.provision.local import LocalProvider

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# A child that leaves its family: its own session, its parent gone. Only a subreaper still sees it.
RUNAWAY = [
    "/bin/sh", "-c", "setsid sh -c 'echo $$ > \"$0\"; exec sleep 600' \"$0\" & exec sleep 600",
]  # fmt: skip


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def machine(tmp_path: Path) -> tuple[LocalProvider, Path]:
    marker = tmp_path / "runaway.pid"
    command = [*RUNAWAY, str(marker)]
    return LocalProvider(command=lambda _: command, log_dir=tmp_path / "logs", environment={}), marker


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


SPEC = NodeSpec(name="s0", role=Role.SPOT)


@pytest.mark.parametrize("verb", ["terminate", "kill"])
def test_a_power_cut_takes_runaways_along(tmp_path: Path, verb: str) -> None:
    provider, marker = machine(tmp_path)
    provider.launch(SPEC)
    until(lambda: marker.exists() and marker.read_text().strip() != "")
    runaway = int(marker.read_text())
    getattr(provider, verb)("s0")
    until(lambda: gone(runaway))
    (info,) = provider.list()
    assert info.state is NodeState.GONE
    assert info.reason == {"terminate": "terminated", "kill": "preempted"}[verb]


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from spotlight.provision.local import LocalProvider\n"
        "from spotlight.provision.base import NodeSpec, Role\n"
        f"p = LocalProvider(command=lambda s: {[*RUNAWAY, str(marker)]!r}, log_dir=Path({str(tmp_path)!r}), "
        "environment={})\n"
        "p.launch(NodeSpec(name='s0', role=Role.SPOT))\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    until(lambda: marker.exists() and marker.read_text().strip() != "")
    runaway = int(marker.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: gone(runaway))


def test_a_launch_is_idempotent_and_a_dead_name_can_live_again(tmp_path: Path) -> None:
    provider = LocalProvider(command=lambda _: SLEEP, log_dir=tmp_path, environment={})
    provider.launch(SPEC)
    provider.launch(SPEC)
    (first,) = provider.list()
    provider.terminate("s0")
    provider.terminate("s0")
    provider.terminate("never-launched")
    provider.launch(SPEC)
    (second,) = provider.list()
    assert (first.instance, second.instance) == ("s0-1", "s0-2")
    assert second.state is NodeState.UP
    provider.close()


def test_a_command_that_ends_by_itself_is_a_lost_machine_with_a_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    provider = LocalProvider(command=lambda _: command, log_dir=tmp_path, environment={})
    provider.launch(SPEC)
    until(lambda: provider.list()[0].state is NodeState.GONE)
    assert provider.list()[0].reason == "process ended with code 3"
