"""Desired against real: keeps asking for the spot nodes that a run wishes for and does not have.

Looks like a provider whose `launch` answers at once: to launch is to wish, to terminate is to wish no longer. What the
cloud says to each attempt decides when and where the next one is made (`core.zones`): no capacity backs the zones off,
no quota gives the region up, and the run goes on with what is there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from spotlight.core.zones import ZoneBook
from spotlight.errors import CapacityError, CredentialError, QuotaError, SpotlightError
from spotlight.provision.base import NodeInfo, NodeSpec, NodeState, Provider

MAX_LAUNCHES = 4  # what a local SkyPilot server works on at once
LOOK_S = 2.0
Say = Callable[[str], None]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Wish:
    spec: NodeSpec
    since: float = 0.0
    attempt: Future[None] | None = None
    zones: tuple[str, ...] = ()
    seen: NodeInfo | None = None


class Reconciler:
    """Wraps a provider whose `launch` blocks. `say` hears of every attempt that failed, and why.

    `step` is one look; `start` looks from a thread of its own.
    """

    def __init__(
        self,
        provider: Provider,
        zones: ZoneBook,
        *,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
        max_launches: int = MAX_LAUNCHES,
    ) -> None:
        self._provider, self._zones, self._say, self._clock = provider, zones, say, clock
        self._max_launches = max_launches
        self._wishes: dict[str, _Wish] = {}
        self._ever: set[str] = set()
        self._pool = ThreadPoolExecutor(max_launches, thread_name_prefix="launch")
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="reconcile")

    def start(self) -> None:
        """Look every few seconds from now on."""
        self._thread.start()

    def launch(self, spec: NodeSpec) -> None:
        """Wish for a node, for as long as it takes."""
        with self._lock:
            self._wishes.setdefault(spec.name, _Wish(spec))
            self._ever.add(spec.name)

    def list(self) -> list[NodeInfo]:
        """What the last look saw of the nodes wished for; none of those that never came."""
        with self._lock:
            return [wish.seen for wish in self._wishes.values() if wish.seen is not None]

    def terminate(self, name: str) -> None:
        """Wish for a node no longer, and end it."""
        with self._lock:
            wish = self._wishes.pop(name, None)
        if wish is not None and wish.attempt is not None:
            wish.attempt.cancel()
        self._provider.terminate(name)

    def close(self) -> None:
        """Wish for nothing any more; end what is there, launches under way included."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._wishes.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._end(self._ever)
        self._pool.shutdown(wait=True)  # a launch that was under way may have made a machine since
        self._end(self._ever)

    def step(self) -> None:
        """One look: take in what the cloud lists and what attempts came to, then ask for what is missing."""
        now = self._clock()
        listed = {info.name: info for info in self._provider.list()}
        with self._lock:
            for wish in self._wishes.values():
                self._take_in(wish, listed.get(wish.spec.name), now)
            missing = [wish for wish in self._wishes.values() if self._is_missing(wish)]
            busy = sum(wish.attempt is not None for wish in self._wishes.values())
            for wish in missing[: max(self._max_launches - busy, 0)]:
                if zones := self._zones.open(now):
                    wish.zones = zones
                    wish.attempt = self._pool.submit(self._provider.launch, replace(wish.spec, zones=zones))

    def _look(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self.step()
            except SpotlightError as error:  # the cloud did not answer: look again
                log.warning("looking at the machines: %s", error.message)

    def _take_in(self, wish: _Wish, info: NodeInfo | None, now: float) -> None:
        if wish.attempt is not None and wish.attempt.done():
            self._judge(wish, wish.attempt, now)
            wish.attempt = None
        before = wish.seen
        if info is None and before is not None:  # forgotten by the cloud: it is gone all the same
            info = replace(before, state=NodeState.GONE, reason=before.reason or "no longer listed")
        if info is None:
            return
        if before is None or before.instance != info.instance:
            wish.since = now
        elif info.state is NodeState.GONE and before.state is not NodeState.GONE:
            self._zones.lost(info.zone, now - wish.since, now)
        wish.seen = info

    def _judge(self, wish: _Wish, attempt: Future[None], now: float) -> None:
        error = None if attempt.cancelled() else attempt.exception()
        if error is None:
            return
        text = error.message if isinstance(error, SpotlightError) else f"{type(error).__name__}: {error}"
        if isinstance(error, QuotaError | CredentialError):
            self._zones.give_up(text)
            self._say(f"no more spot nodes are asked for: {text}")
            return
        self._zones.failed(wish.zones, now)
        again_s = max(self._zones.next_open() - now, 0.0)
        what = "no capacity" if isinstance(error, CapacityError) else "launch failed"
        self._say(f"{what} ({', '.join(wish.zones)}), next attempt in {again_s:.0f} s: {text}")

    def _is_missing(self, wish: _Wish) -> bool:
        return wish.attempt is None and (wish.seen is None or wish.seen.state is NodeState.GONE)

    def _end(self, names: Collection[str]) -> None:
        for name in sorted(names):
            try:
                self._provider.terminate(name)
            except SpotlightError as error:
                self._say(f"{name} could not be ended: {error.message}")
