"""Lazy timers: each key is asked again for its true deadline when its entry comes up."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Deadlines:
    """At most one live entry per key, never later than the key's true deadline; O(log n) amortised.

    What `due` returns depends on the true deadlines alone, not on when it was called before: a call that
    returns nothing leaves no trace.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._armed: dict[str, float] = {}

    def arm(self, key: str, at: float) -> None:
        """Make sure that `key` is looked at by `at`."""
        armed = self._armed.get(key)
        if armed is None or at < armed:
            self._armed[key] = at
            heapq.heappush(self._heap, (at, key))

    def due(self, now: float, deadline_of: Callable[[str], float | None]) -> list[str]:
        """The keys whose deadline has come, earliest first. `deadline_of` says None if there is none."""
        ready = []
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._armed.get(key) != at:
                continue
            del self._armed[key]
            deadline = deadline_of(key)
            if deadline is None:
                continue
            if deadline <= now:
                ready.append((deadline, key))
            else:
                self.arm(key, deadline)
        return [key for _, key in sorted(ready)]
