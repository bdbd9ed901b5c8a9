"""A provider in memory that says no in all the ways clouds do, for those who must live with it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from spotlight.errors import SpotlightError
from spotlight.provision.base import NodeInfo, NodeSpec, NodeState


@dataclass
class FakeCloud:
    """Keeps to the provider contract. `answers` are given to launches in order: an error, or None for yes.

    `half`: a refused launch leaves a machine behind. `gate`: launches wait for it (a cloud that hangs).
    """

    answers: list[SpotlightError | None] = field(default_factory=list)
    half: bool = False
    gate: threading.Event | None = None
    machines: dict[str, NodeInfo] = field(default_factory=dict)
    launches: list[NodeSpec] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def launch(self, spec: NodeSpec) -> None:
        with self._lock:
            if self.is_alive(spec.name):
                return
            self.launches.append(spec)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            answer = self.answers.pop(0) if self.answers else None
            if answer is None or self.half:
                self._boot(spec)
        try:
            if self.gate is not None:
                assert self.gate.wait(20)
        finally:
            with self._lock:
                self.at_once -= 1
        if answer is not None:
            raise answer

    def _boot(self, spec: NodeSpec) -> None:
        zone = spec.zones[0] if spec.zones else "zone"
        number = sum(launch.name == spec.name for launch in self.launches)
        self.machines[spec.name] = NodeInfo(
            name=spec.name, role=spec.role, instance=f"i-{spec.name}-{number}", state=NodeState.UP, zone=zone
        )

    def list(self) -> list[NodeInfo]:
        with self._lock:
            return list(self.machines.values())

    def terminate(self, name: str) -> None:
        with self._lock:
            self.ended.append(name)
            self._gone(name, "Client.UserInitiatedShutdown", interrupted=False)

    def kill(self, name: str) -> None:
        """The cloud takes the machine."""
        with self._lock:
            self._gone(name, "Server.SpotInstanceTermination", interrupted=True)

    def forget(self, name: str) -> None:
        """An ended machine is no longer listed."""
        with self._lock:
            del self.machines[name]

    def _gone(self, name: str, reason: str, *, interrupted: bool) -> None:
        if self.is_alive(name):
            was = self.machines[name]
            self.machines[name] = NodeInfo(
                name=name, role=was.role, instance=was.instance, state=NodeState.GONE, reason=reason,
                zone=was.zone, interrupted=interrupted,
            )  # fmt: skip

    def is_alive(self, name: str) -> bool:
        return name in self.machines and self.machines[name].state is not NodeState.GONE

    def close(self) -> None:
        for name in list(self.machines):
            self.terminate(name)
