"""One head per run: a lock in the run's own storage, with no trust in anybody's wall clock.

The lock is one object. A head creates it, or takes it over by compare-and-set with `epoch` + 1, and then
writes a new `beat` at least every `ttl_s`. Whoever wants it watches: a claim that did not change for `ttl_s`
of the watcher's own clock has no living holder. The holder in turn stops trusting itself after 0.8 `ttl_s`
without a successful beat, measured from before that beat was sent, so it always stops first. Of two
processes on one machine the kernel knows at once which lives. The lock is never deleted: epochs only rise.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from spotlight.errors import FencedError, IntegrityError, LockError, NotFoundError, SpotlightError
from spotlight.store.objects import ObjectStore

_SELF_TRUST = 0.8  # of ttl_s; the rest covers clocks that run at different speeds
_MAX_TTL_S = 600.0


def boot_clock() -> float:
    """Seconds since boot, suspension included: a head that slept must not think that no time has passed."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True, slots=True)
class Claim:
    """What the lock object says. `process` is the machine, boot and start time that make a pid unique."""

    holder: str
    host: str
    pid: int
    process: str
    ttl_s: float
    epoch: int = 1
    beat: int = 0
    released: bool = False

    @classmethod
    def mine(cls, ttl_s: float) -> Claim:
        """A fresh claim of this process."""
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), _process(os.getpid()) or "", ttl_s)

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Claim:
        """From JSON. IntegrityError on anything that `encode` does not write."""
        try:
            claim = cls(**json.loads(data))
            if claim._plausible():
                return claim
        except (ValueError, TypeError, AttributeError):
            pass  # reported below, like a claim of well-formed nonsense
        raise IntegrityError(f"broken lock: {data[:80]!r}", hint="if no head runs, delete the lock object")

    def _plausible(self) -> bool:
        texts = f"{self.holder}{self.host}{self.process}".isprintable()
        numbers = (
            type(self.pid) is type(self.epoch) is type(self.beat) is int and self.pid > 0 and self.beat >= 0
        )
        return texts and numbers and self.epoch >= 1 and 0 < self.ttl_s <= _MAX_TTL_S


class RunLock:
    """A held lock. As a context manager it beats from a thread of its own and releases at the end.

    Call `check` before anything that only the one head may do; `epoch` goes into what others compare.
    """

    def __init__(
        self, store: ObjectStore, key: str, claim: Claim, tag: str, since_s: float, clock: Callable[[], float]
    ) -> None:
        self._store, self._key, self._clock = store, key, clock
        self._claim, self._tag, self._since_s = claim, tag, since_s
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    @property
    def epoch(self) -> int:
        """Rises with every change of the holder."""
        return self._claim.epoch

    def check(self) -> None:
        """FencedError unless this process surely still holds the lock. Touches no storage."""
        silent_s = self._clock() - self._since_s
        if self._lost or silent_s > _SELF_TRUST * self._claim.ttl_s:
            why = "another head took it" if self._lost else f"no renewal for {silent_s:.0f} s"
            raise FencedError(f"this head lost the run's lock (epoch {self.epoch}): {why}")

    def renew(self) -> None:
        """Write the next beat. FencedError if the lock was lost; RunError if the storage fails."""
        self.check()
        sent_s = self._clock()
        self._write(replace(self._claim, beat=self._claim.beat + 1))
        self._since_s = sent_s

    def release(self) -> None:
        """Give the lock up, so the next head need not wait. Nothing happens if it is lost already."""
        try:
            self.check()
            self._write(replace(self._claim, beat=self._claim.beat + 1, released=True))
        except SpotlightError:
            return  # lost, or out of reach: the next head waits a little longer
        finally:
            self._lost = True

    def __enter__(self) -> RunLock:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.release()

    def _write(self, claim: Claim) -> None:
        tag = self._store.put_if(self._key, claim.encode(), self._tag)
        if tag is None:
            self._lost = True
            self.check()
        else:
            self._claim, self._tag = claim, tag

    def _beat(self) -> None:
        while not self._stop.wait(self._claim.ttl_s / 4):
            try:
                self.renew()
            except FencedError:
                return
            except SpotlightError:
                continue  # an outage: try on until `check` gives up


class Candidate:
    """A process that wants the lock; `attempt` until it returns one."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        key: str = "lock.json",
        ttl_s: float = 30.0,
        claim: Claim | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._store, self._key, self._clock = store, key, clock
        self._claim = claim or Claim.mine(ttl_s)
        self._seen: tuple[str, float] | None = None  # the other's tag, and since when it has not changed

    def attempt(self) -> RunLock | None:
        """The lock, or None: the holder shows no life yet, ask again. LockError if it lives."""
        sent_s = self._clock()
        tag = self._store.put_new(self._key, self._claim.encode())
        if tag is not None:
            return self._won(self._claim, tag, sent_s)
        try:
            blob = self._store.get(self._key)
        except NotFoundError:
            return None
        theirs = Claim.decode(blob.data)
        if not self._over(theirs, blob.tag, sent_s):
            return None
        mine, sent_s = replace(self._claim, epoch=theirs.epoch + 1), self._clock()
        tag = self._store.put_if(self._key, mine.encode(), blob.tag)
        return None if tag is None else self._won(mine, tag, sent_s)

    def _over(self, theirs: Claim, tag: str, now: float) -> bool:
        """Whether the claim of another has ended. LockError if its holder surely lives."""
        alive = _alive(theirs)
        if theirs.released or alive is False:
            return True
        if alive or (self._seen and self._seen[0] != tag):
            raise LockError(
                f"the run is held by process {theirs.pid} on {theirs.host} (epoch {theirs.epoch})",
                hint=f"stop it, or wait: {theirs.ttl_s:.0f} s after its last sign of life it can be replaced",
            )
        if self._seen is None:
            self._seen = (tag, self._clock())
        return now - self._seen[1] > theirs.ttl_s

    def _won(self, claim: Claim, tag: str, sent_s: float) -> RunLock:
        return RunLock(self._store, self._key, claim, tag, sent_s, self._clock)


def acquire(store: ObjectStore, *, key: str = "lock.json", ttl_s: float = 30.0) -> RunLock:
    """Take the run's lock: at once if it is free, after the holder's `ttl_s` of silence if its machine died.

    LockError (exit code 3) naming the holder as soon as it shows life.
    """
    candidate = Candidate(store, key=key, ttl_s=ttl_s)
    while (lock := candidate.attempt()) is None:
        time.sleep(min(1.0, ttl_s / 10))
    return lock


def _alive(claim: Claim) -> bool | None:
    """Whether the claim's process runs on this machine; None if it is another machine's, or none can tell."""
    machine = _machine()
    if not machine or not claim.process.startswith(f"{machine}/"):
        return None
    return _process(claim.pid) == claim.process


def _machine() -> str | None:
    """This boot of this machine as seen from this process's own view of pids (containers differ)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _process(pid: int) -> str | None:
    """Machine and start time of a running process; None if it is gone, dead but unreaped, or hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    machine, state, started = _machine(), fields[0], fields[19]
    return None if machine is None or state in "ZX" else f"{machine}/{started}"
