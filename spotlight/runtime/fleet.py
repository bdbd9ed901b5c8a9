"""The spot nodes of a run: wished for, watched, staffed with an explorer, taken by a trace, brought back.

One thread looks at what the provider and Ray say and does the next thing for each node:

    launched -> in Ray: explorer starts -> ready -> lost (told to the coordinator) -> launched again after a while

Nothing here decides what happens to work; that is the coordinator's business, which hears of losses from here,
from its own heartbeats, or from both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from spotlight.provision.base import NodeInfo, NodeSpec, NodeState, Provider, Role, spot_names
from spotlight.provision.local import LocalProvider
from spotlight.runtime import notices
from spotlight.runtime.accounts import Accounts
from spotlight.runtime.crew import Crew, Gpus
from spotlight.runtime.explorer import Explorer
from spotlight.runtime.preempt import Preemption
from spotlight.runtime.session import Session

LOOK_S = 0.1

Emit = Callable[[Mapping[str, Any]], None]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seat:
    """One wished-for node, through all its lives."""

    spec: NodeSpec
    crew: Crew
    instance: str = ""
    past_instance: str = ""
    node_id: str = ""
    lives: int = 0
    announced: bool = False  # whether the world knows that this life is ready
    lost_at: float | None = None
    past_ids: set[str] = field(default_factory=set)


class Fleet:
    """Keeps `num_spot` nodes alive, each with an explorer on every group of GPUs in `shared_out`.

    A preemption trace needs nodes of this machine.
    """

    def __init__(
        self,
        session: Session,
        *,
        provider: Provider,
        num_spot: int,
        shared_out: Sequence[Gpus],
        told: Mapping[str, Any],
        coordinator: Any,
        respawn_s: float,
        preemptions: Sequence[Preemption],
        emit: Emit,
        accounts: Accounts,
    ) -> None:
        self._session = session
        self._provider = provider
        self._told = told
        self._coordinator = coordinator
        self._respawn_s = respawn_s
        self._emit = emit
        self._accounts = accounts
        self._notice_dir = Path(told["root"]) / "notices"
        self._seats = {name: self._seat(name, shared_out) for name in spot_names(num_spot)}
        self._preemptions = list(preemptions)
        self._due: list[tuple[float, Preemption]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="fleet")
        self._lock = threading.Lock()

    def start(self) -> None:
        """Ask for all nodes at once and return; they come when they come."""
        for seat in self._seats.values():
            self._launch(seat)
        self._thread.start()

    def iteration_began(self, iteration: int) -> None:
        """The clock of the preemption trace."""
        now = time.monotonic()
        with self._lock:
            for item in [p for p in self._preemptions if p.iteration == iteration]:
                self._preemptions.remove(item)
                end = now + item.after_s
                if item.notice_s:
                    self._due.append((max(end - abs(item.notice_s), now), item))
                if not item.false_alarm:
                    self._due.append((end, Preemption(item.iteration, item.after_s, item.node, 0.0)))

    def release(self) -> None:
        """Give all nodes back: they are no longer needed."""
        self.close()
        for name in self._seats:
            # First: a worker that is told of its loss while it lives joins again.
            self._provider.terminate(name)
            self._coordinator.node_lost.remote(name, "released", False)
            self._accounts.ended(name, "user")

    def close(self) -> None:
        """Stop looking. The nodes themselves end with the session."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    # ------------------------------------------------------------------------------------ the one thread

    def _look(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self._carry_out_trace()
                self._see_losses()
                self._relaunch()
                self._staff()
                self._see_explorers()
            except (ray.exceptions.RayError, RuntimeError, OSError) as error:
                if not self._closing.is_set():
                    log.warning("looking after the nodes: %s", str(error)[:300])

    def _carry_out_trace(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = sorted((item for item in self._due if item[0] <= now), key=lambda item: item[0])
            self._due = [item for item in self._due if item[0] > now]
        for _, item in due:
            if item.notice_s:
                notices.announce(self._notice_file(item.node), abs(item.notice_s))
                self._accounts.notice(item.node)
                self._tell(item.node, "notice", f"to be taken in {abs(item.notice_s):g} s")
            elif isinstance(self._provider, LocalProvider):
                self._provider.kill(item.node)

    def _see_losses(self) -> None:
        for info in self._provider.list():
            seat = self._seats.get(info.name)
            if seat is None:
                continue
            if info.state is not NodeState.GONE:
                self._arrived(seat, info)
            elif seat.lost_at is None and info.instance != seat.past_instance:
                self._lost(seat, info)

    def _arrived(self, seat: _Seat, info: NodeInfo) -> None:
        if info.state is NodeState.UP and info.instance != seat.instance:
            seat.instance = info.instance
            self._accounts.up(info.name, zone=info.zone, instance=info.instance)

    def _lost(self, seat: _Seat, info: NodeInfo) -> None:
        seat.past_instance = info.instance
        seat.lost_at = time.monotonic()
        seat.past_ids.add(seat.node_id)
        seat.crew.lose_all()
        self._notice_file(info.name).unlink(missing_ok=True)
        self._accounts.ended(info.name, "interrupted" if info.interrupted else "failed")
        # Nobody took it: what it was making may have broken it, and is watched from now on.
        self._coordinator.node_lost.remote(info.name, info.reason, info.interrupted)
        self._tell(info.name, "lost", info.reason, interrupted=info.interrupted)

    def _relaunch(self) -> None:
        for seat in self._seats.values():
            if seat.lost_at is not None and time.monotonic() - seat.lost_at >= self._respawn_s:
                self._launch(seat)

    def _launch(self, seat: _Seat) -> None:
        seat.lost_at, seat.node_id, seat.announced = None, "", False
        seat.lives += 1
        self._provider.launch(seat.spec)
        self._accounts.launched(seat.spec.name, "spot", "explorer")
        self._tell(seat.spec.name, "joining", "relaunched" if seat.lives > 1 else "launched")

    def _staff(self) -> None:
        waiting = [s for s in self._seats.values() if s.lost_at is None and s.crew.vacant]
        if not waiting:
            return
        ids = self._session.node_ids()
        for seat in waiting:
            fresh = [i for i, name in ids.items() if name == seat.spec.name and i not in seat.past_ids]
            if fresh:
                seat.node_id = fresh[-1]
                seat.crew.start(seat.node_id)

    def _see_explorers(self) -> None:
        for name, seat in self._seats.items():
            for problem in seat.crew.problems():
                if seat.lost_at is None:
                    self._emit({"kind": "warning", "text": f"explorer on {name}: {problem}"})
            if seat.crew.ready and not seat.announced:
                seat.announced = True
                self._accounts.ready(name)
                self._tell(name, "ready" if seat.lives == 1 else "back", "explorer ready")

    def _seat(self, name: str, shared_out: Sequence[Gpus]) -> _Seat:
        def make(index: int, gpus: Gpus, node_id: str) -> Any:
            actor = ray.remote(Explorer).options(**self._session.on(node_id))
            notice_file = str(self._notice_file(name))
            return actor.remote(self._told, self._coordinator, name, notice_file, index, list(gpus))

        return _Seat(NodeSpec(name=name, role=Role.SPOT), Crew(shared_out, make))

    def _tell(self, node: str, state: str, why: str, **more: Any) -> None:
        who = {"kind": "node", "node": node, "role": "explorer", "price_class": "spot"}
        self._emit({**who, "state": state, "why": why, **more})

    def _notice_file(self, node: str) -> Path:
        return self._notice_dir / f"{node}.json"
