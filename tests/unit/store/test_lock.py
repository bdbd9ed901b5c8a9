"""The run's lock: one head at a time, whatever dies, freezes or comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spotlight.errors import FencedError, IntegrityError, LockError, RunError
from spotlight.store.lock import Candidate, Claim, RunLock, acquire
from spotlight.store.objects import ObjectStore, open_store

HEAD = """
import sys
import time
from pathlib import Path
from spotlight.errors import SpotlightError
from spotlight.store.lock import acquire
from spotlight.store.objects import open_store
try:
    with acquire(open_store(Path(sys.argv[1])), ttl_s=5) as lock:
        print("epoch", lock.epoch, flush=True)
        sys.stdin.readline()
        lock.check()
except SpotlightError as error:
    print(error, "|", error.hint, flush=True)
    raise SystemExit(error.exit_code)
"""


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def claim(name: str) -> Claim:
    """Of a process on a machine of its own."""
    return Claim(name * 4, f"host-{name}", 77, f"machine-{name}/1", 10.0)


def candidate(store: ObjectStore, name: str, clock: Clock) -> Candidate:
    return Candidate(store, claim=claim(name), clock=clock)


def take(store: ObjectStore, name: str, clock: Clock) -> RunLock:
    lock = candidate(store, name, clock).attempt()
    assert lock
    return lock


def head(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_two_heads_started_by_mistake(tmp_path: Path) -> None:
    first = head(tmp_path)
    assert line(first) == "epoch 1"
    second = head(tmp_path)
    said, _ = second.communicate("\n", timeout=30)
    assert second.returncode == 3
    assert f"held by process {first.pid} on {os.uname().nodename} (epoch 1)" in said
    first.communicate("\n", timeout=30)
    assert first.returncode == 0
    third = head(tmp_path)
    assert line(third) == "epoch 2"
    third.communicate("\n", timeout=30)


def test_a_killed_head_is_replaced_at_once_on_its_own_machine(tmp_path: Path) -> None:
    first = head(tmp_path)
    assert line(first) == "epoch 1"
    first.kill()  # not reaped yet: a zombie counts as dead
    second = head(tmp_path)
    assert line(second) == "epoch 2"
    first.communicate()
    second.communicate("\n", timeout=30)
    assert second.returncode == 0


def test_a_frozen_head_is_alive(tmp_path: Path) -> None:
    first = head(tmp_path)
    assert line(first) == "epoch 1"
    first.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(LockError, match=f"process {first.pid}"):
            acquire(open_store(tmp_path))
    finally:
        first.send_signal(signal.SIGCONT)
        first.communicate("\n", timeout=30)


def test_another_machine_is_watched_for_its_time_to_live() -> None:
    store, clock = open_store("memory://"), Clock()
    old = take(store, "a", clock)
    watcher = candidate(store, "b", clock)
    assert watcher.attempt() is None
    clock.now_s += 10.0
    assert watcher.attempt() is None
    clock.now_s += 0.1
    new = watcher.attempt()
    assert new
    assert (old.epoch, new.epoch) == (1, 2)
    new.check()
    for use in (old.check, old.renew):
        with pytest.raises(FencedError, match="epoch 1"):
            use()


def test_a_sign_of_life_refuses_the_watcher() -> None:
    store, clock = open_store("memory://"), Clock()
    old, watcher = take(store, "a", clock), candidate(store, "b", clock)
    assert watcher.attempt() is None
    clock.now_s += 5
    old.renew()
    with pytest.raises(LockError, match=r"process 77 on host-a \(epoch 1\)") as caught:
        watcher.attempt()
    assert caught.value.exit_code == 3
    assert "10 s after its last sign" in str(caught.value.hint)


def test_the_holder_stops_before_anyone_may_follow() -> None:
    store, clock = open_store("memory://"), Clock()
    lock = take(store, "a", clock)
    clock.now_s += 8.0
    lock.check()
    clock.now_s += 0.1
    with pytest.raises(FencedError, match="no renewal for 8 s"):
        lock.check()


def test_a_beat_counts_from_before_it_was_sent() -> None:
    """A beat that took 7 s to be answered leaves 1 s of trust, for a watcher may have seen it 7 s ago."""
    clock = Clock()

    class Slow:
        def __init__(self, store: ObjectStore) -> None:
            self.url, self.get, self.put_new = store.url, store.get, store.put_new
            self.list_keys, self.delete, self.real = store.list_keys, store.delete, store

        def put_if(self, key: str, data: bytes, tag: str) -> str | None:
            done = self.real.put_if(key, data, tag)
            clock.now_s += 7
            return done

    lock = take(Slow(open_store("memory://")), "a", clock)
    lock.renew()
    clock.now_s += 1.1
    with pytest.raises(FencedError):
        lock.check()


def test_a_zombie_finds_out_when_it_beats() -> None:
    store, clock, frozen = open_store("memory://"), Clock(), Clock()
    zombie = take(store, "a", frozen)  # its own clock stands still, as in a suspended machine
    watcher = candidate(store, "b", clock)
    watcher.attempt()
    clock.now_s += 11
    assert watcher.attempt()
    with pytest.raises(FencedError, match="another head took it"):
        zombie.renew()
    with pytest.raises(FencedError):
        zombie.check()
    zombie.release()
    held = Claim.decode(store.get("lock.json").data)
    assert (held.host, held.epoch, held.released) == ("host-b", 2, False)


def test_a_released_lock_is_free_at_once_and_epochs_rise() -> None:
    store, clock = open_store("memory://"), Clock()
    for epoch, name in enumerate("abab", start=1):
        lock = take(store, name, clock)
        assert lock.epoch == epoch
        lock.release()
        with pytest.raises(FencedError):
            lock.check()


def test_of_two_watchers_one_wins() -> None:
    store, clock = open_store("memory://"), Clock()
    take(store, "a", clock)
    watchers = [candidate(store, name, clock) for name in "bc"]
    for watcher in watchers:
        assert watcher.attempt() is None
    clock.now_s += 11
    assert watchers[0].attempt()
    with pytest.raises(LockError, match="host-b"):
        watchers[1].attempt()


def test_a_held_lock_beats_by_itself(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with acquire(store, ttl_s=2.0) as lock:
        while Claim.decode(store.get("lock.json").data).beat < 6:  # 3 s: past its time to live
            time.sleep(0.05)
        lock.check()
    assert Claim.decode(store.get("lock.json").data).released


def test_a_reused_pid_is_not_the_holder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    mine = Claim.mine(30.0)
    store.put_new("lock.json", replace(mine, process=mine.process + "9", holder="older").encode())
    assert acquire(store).epoch == 2


def test_an_outage_is_outlived_up_to_a_point() -> None:
    real, clock, down = open_store("memory://"), Clock(), [False]

    class Flaky:
        def __init__(self) -> None:
            self.url, self.get, self.put_new = real.url, real.get, real.put_new
            self.list_keys, self.delete = real.list_keys, real.delete

        def put_if(self, key: str, data: bytes, tag: str) -> str | None:
            if down[0]:
                raise RunError("down")
            return real.put_if(key, data, tag)

    lock = take(Flaky(), "a", clock)
    down[0] = True
    clock.now_s += 5
    with pytest.raises(RunError, match="down"):
        lock.renew()
    lock.check()
    down[0] = False
    lock.renew()
    clock.now_s += 5
    lock.check()
    down[0] = True
    clock.now_s += 5
    with pytest.raises(FencedError):
        lock.renew()
    lock.release()  # does not raise: it is the end anyway


GOOD = json.loads(claim("a").encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        *(
            json.dumps(GOOD | change)
            for change in (
                {"epoch": 0},
                {"epoch": "1"},
                {"epoch": 1.5},
                {"pid": "../../etc/passwd"},
                {"pid": -1},
                {"ttl_s": 1e9},
                {"ttl_s": None},
                {"host": "x\u001b[2J"},
                {"process": None, "host": "\n"},
                {"extra": 1},
            )
        ),
    ],
)
def test_a_broken_lock_is_refused_not_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock.json").write_text(text)
    with pytest.raises(IntegrityError, match="broken lock") as caught:
        acquire(open_store(tmp_path))
    assert "delete the lock object" in str(caught.value.hint)
    assert (tmp_path / "lock.json").read_text() == text
