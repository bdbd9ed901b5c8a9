"""Heads that try, beat, freeze and release in any order, their clocks a little apart: never two holders."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spotlight.errors import FencedError, LockError
from spotlight.store.lock import Candidate, Claim, RunLock
from spotlight.store.objects import open_store

HEADS = st.integers(0, 2)
PAUSES_S = st.sampled_from([0.5, 3.0, 6.0, 8.5, 9.5, 10.5, 12.0])


class Heads(RuleBasedStateMachine):
    """Each head has its own clock, offset and up to 10 % off in speed."""

    def __init__(self) -> None:
        super().__init__()
        self.store = open_store("memory://")
        self.now_s = 0.0
        self.trying: dict[int, Candidate] = {}
        self.locks: list[RunLock] = []
        self.born = 0

    @rule(seconds=PAUSES_S)
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(head=HEADS)
    def attempt(self, head: int) -> None:
        if head not in self.trying:
            self.born += 1
            name, speed, offset = f"h{self.born}", 0.9 + 0.1 * head, 1000.0 * head
            claim = Claim(name, name, 1, f"machine-{name}/1", 10.0)
            self.trying[head] = Candidate(self.store, claim=claim, clock=lambda: offset + speed * self.now_s)
        try:
            lock = self.trying[head].attempt()
        except LockError:
            del self.trying[head]
            return
        if lock:
            assert all(lock.epoch > other.epoch for other in self.locks)
            self.locks.append(lock)
            del self.trying[head]

    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        if self.locks:
            lock = data.draw(st.sampled_from(self.locks))
            with suppress(FencedError):
                lock.renew()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.locks:
            data.draw(st.sampled_from(self.locks)).release()

    @invariant()
    def one_holder(self) -> None:
        assert sum(map(holds, self.locks)) <= 1


def holds(lock: RunLock) -> bool:
    try:
        lock.check()
    except FencedError:
        return False
    return True


TestHeads = Heads.TestCase
TestHeads.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
