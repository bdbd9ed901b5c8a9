"""This machine as a cloud: every node is a supervised process tree that lives and dies as one.

For quickstarts, tests and chaos: `terminate` and `kill` are real SIGKILLs of real processes. Nothing outlives
the process that made the provider, not even if that one is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from spotlight.provision.base import NodeInfo, NodeSpec, NodeState

Command = Callable[[NodeSpec], Sequence[str]]


@dataclass(slots=True)
class _Machine:
    spec: NodeSpec
    process: subprocess.Popen[bytes]
    launches: int
    reason: str = ""

    @property
    def instance(self) -> str:
        return f"{self.spec.name}-{self.launches}"


class LocalProvider:
    """Nodes as process trees on this host.

    `command` gives the command line that makes a node of a spec; its output goes to `log_dir/<name>.log`;
    `environment` is added to our own.
    """

    def __init__(self, *, command: Command, log_dir: Path, environment: Mapping[str, str]) -> None:
        self._command = command
        self._log_dir = log_dir
        self._environment = {**os.environ, **environment}
        self._machines: dict[str, _Machine] = {}

    def launch(self, spec: NodeSpec) -> None:
        """Start a node, unless one of that name is alive."""
        before = self._machines.get(spec.name)
        if before and before.process.poll() is None:
            return
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with (self._log_dir / f"{spec.name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "spotlight.provision.supervise", *self._command(spec)],
                stdin=subprocess.PIPE,  # held open: its closing tells the supervisor that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        self._machines[spec.name] = _Machine(spec, process, before.launches + 1 if before else 1)

    def list(self) -> list[NodeInfo]:
        """All nodes ever launched, each in its latest life."""
        return [self._info(machine) for machine in self._machines.values()]

    def terminate(self, name: str) -> None:
        """Kill a node at our own wish and wait until nothing of it is left."""
        self._end(name, "terminated")

    def kill(self, name: str) -> None:
        """Preempt a node: the same power cut, but not at our wish."""
        self._end(name, "preempted")

    def pids(self, name: str) -> dict[str, int]:
        """The processes of a node by command name, for those who aim at one of them (chaos)."""
        machine = self._machines[name]
        children = psutil.Process(machine.process.pid).children(recursive=True)
        return {process.name(): process.pid for process in children}

    def close(self) -> None:
        """Kill every node."""
        for name in self._machines:
            self.terminate(name)

    def _info(self, machine: _Machine) -> NodeInfo:
        alive = machine.process.poll() is None
        reason = "" if alive else machine.reason or f"process ended with code {machine.process.returncode}"
        return NodeInfo(
            name=machine.spec.name,
            role=machine.spec.role,
            instance=machine.instance,
            state=NodeState.UP if alive else NodeState.GONE,
            reason=reason,
            interrupted=not alive and machine.reason == "preempted",
        )

    def _end(self, name: str, reason: str) -> None:
        machine = self._machines.get(name)
        if machine is None or machine.process.poll() is not None:
            return
        machine.reason = reason
        machine.process.send_signal(signal.SIGTERM)
        machine.process.wait(timeout=30)
