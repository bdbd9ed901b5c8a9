"""Where the last requests of a roll-out finish soonest: what a request costs where, and who is free when.

Cost of a denoising step of a batch key = EWMA over all workers; a worker's factor = EWMA of its cost over
the key's. A prediction is their product; None until measured.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

_WEIGHT = 0.2  # of the newest measurement
_FACTOR_RANGE = (0.05, 20.0)  # one absurd measurement must not rule a worker out for good


class CostModel:
    """Seconds of a worker's time per denoising step, learned from outcomes."""

    def __init__(self) -> None:
        self._key_s: dict[str, float] = {}
        self._factor: dict[str, float] = {}

    def observe(self, worker: str, batch_key: str, step_s: float) -> None:
        """Learn from one measured request; non-positive times are not measurements."""
        if step_s <= 0:
            return
        mean_s = self._key_s.get(batch_key, step_s)
        low, high = _FACTOR_RANGE
        factor = self._factor.get(worker, 1.0)
        self._factor[worker] = factor + _WEIGHT * (min(max(step_s / mean_s, low), high) - factor)
        self._key_s[batch_key] = mean_s + _WEIGHT * (step_s - mean_s)

    def predict_s(self, worker: str, batch_key: str, num_steps: int) -> float | None:
        """Seconds for so many steps of one request; an unknown worker counts as average."""
        step_s = self._key_s.get(batch_key)
        return None if step_s is None else step_s * self._factor.get(worker, 1.0) * num_steps


class FinishBook:
    """Busy workers in the order in which each could have finished one more request. O(log n) look-ups."""

    def __init__(self) -> None:
        self._slots: list[tuple[float, str]] = []
        self._slot_of: dict[str, tuple[float, str]] = {}

    def put(self, worker: str, slot_s: float) -> None:
        """Enter a worker, or move it."""
        self.remove(worker)
        self._slot_of[worker] = slot = (slot_s, worker)
        insort(self._slots, slot)

    def remove(self, worker: str) -> None:
        """Forget a worker, if it is there."""
        slot = self._slot_of.pop(worker, None)
        if slot is not None:
            del self._slots[bisect_left(self._slots, slot)]

    def count_between(self, start: float, end: float) -> int:
        """How many could have done one more in [start, end); those overdue at `start` are not trusted to."""
        return bisect_left(self._slots, (end, "")) - bisect_left(self._slots, (start, ""))

    def extremes(self, count: int) -> Iterator[str]:
        """The `count` latest and the `count` most overdue workers: where stragglers are."""
        yield from (worker for _, worker in reversed(self._slots[-count:]))
        yield from (worker for _, worker in self._slots[: min(count, max(0, len(self._slots) - count))])
