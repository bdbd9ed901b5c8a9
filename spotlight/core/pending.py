"""Requests that wait for a worker, in buckets that may share a batch."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from spotlight.core.types import Request, SavedState

# What may share a batch: batch key, steps in all, first step, and the request itself if it must travel alone.
Bucket = tuple[str, int, int, str]


@dataclass(slots=True)
class Record:
    """The life of one request. `fate` is set once: the winning token, or the reason why it was cancelled."""

    request: Request
    id: str
    state: SavedState | None = None
    tokens: list[int] = field(default_factory=list)
    deaths: int = 0
    fate: int | str | None = None
    queued_in: Bucket | None = None

    @property
    def resume_step(self) -> int:
        """The denoising steps that need not be done again."""
        return self.state.step if self.state else 0


class Pending:
    """A priority queue of buckets: the most steps left first, which keeps the tail short, then age.

    Leaving is lazy: a record that is not `queued_in` the bucket any more is skipped. All O(log n) amortised.
    """

    def __init__(self) -> None:
        self._buckets: dict[Bucket, deque[Record]] = {}
        self._order: list[tuple[int, int, Bucket]] = []
        self._age = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, record: Record) -> None:
        """Enter a record at the end of its bucket. One that was there at two deaths travels alone."""
        request = record.request
        alone = record.id if record.deaths > 1 else ""
        bucket = record.queued_in = (request.batch_key, request.num_steps, record.resume_step, alone)
        self._size += 1
        queue = self._buckets.get(bucket)
        if queue is None:
            self._age += 1
            queue = self._buckets[bucket] = deque()
            heapq.heappush(self._order, (record.resume_step - request.num_steps, self._age, bucket))
        queue.append(record)

    def discard(self, record: Record) -> None:
        """Take a record out, if it is in."""
        if record.queued_in is not None:
            record.queued_in = None
            self._size -= 1

    def peek(self) -> Record | None:
        """The record that `pop` would give first."""
        while self._order:
            bucket = self._order[0][2]
            queue = self._buckets[bucket]
            while queue and queue[0].queued_in != bucket:
                queue.popleft()
            if queue:
                return queue[0]
            heapq.heappop(self._order)
            del self._buckets[bucket]
        return None

    def pop(self, max_requests: int) -> list[Record]:
        """Up to so many records of the first bucket."""
        out: list[Record] = []
        first = self.peek()
        if first is None:
            return out
        bucket = first.queued_in
        assert bucket is not None
        queue = self._buckets[bucket]
        while queue and len(out) < max_requests:
            record = queue.popleft()
            if record.queued_in == bucket:
                self.discard(record)
                out.append(record)
        return out
