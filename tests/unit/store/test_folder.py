"""The local folder: atomic, create-only between processes, and clear about a disk that will not take it."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spotlight.errors import NotFoundError, RunError, UserError
from spotlight.store.folder import LocalFolder

CREATE = """
import sys
from pathlib import Path
from spotlight.store.folder import LocalFolder
store, me = LocalFolder(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
print(*[i for i in range(200) if store.put_new(f"k/{i}", f"{me} {i}".encode() * 50)])
"""

ADD = """
import sys
from pathlib import Path
from spotlight.store.folder import LocalFolder
store, left = LocalFolder(Path(sys.argv[1])), 150
print("ready", flush=True)
sys.stdin.readline()
while left:
    blob = store.get("counter")
    left -= store.put_if("counter", b"%d" % (int(blob.data) + 1), blob.tag) is not None
"""


def together(script: str, *args: str, count: int = 2) -> list[str]:
    """Run `script` in `count` processes that begin at the same moment; what each printed after 'ready'."""
    command = [sys.executable, "-c", script]
    procs = [
        subprocess.Popen([*command, *args, f"p{i}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for i in range(count)
    ]
    for proc in procs:
        assert proc.stdout
        assert proc.stdout.readline() == "ready\n"
    for proc in procs:
        assert proc.stdin
        proc.stdin.write("go\n")
        proc.stdin.flush()
    outputs = [proc.communicate()[0] for proc in procs]
    assert [proc.returncode for proc in procs] == [0] * count
    return outputs


def test_two_processes_create_each_key_once(tmp_path: Path) -> None:
    won = [set(map(int, output.split())) for output in together(CREATE, str(tmp_path), count=3)]
    assert sum(map(len, won)) == 200
    assert set.union(*won) == set(range(200))
    store = LocalFolder(tmp_path)
    for me, mine in enumerate(won):
        for i in mine:
            assert store.get(f"k/{i}").data == f"p{me} {i}".encode() * 50


def test_two_processes_lose_no_update(tmp_path: Path) -> None:
    LocalFolder(tmp_path).put_new("counter", b"0")
    together(ADD, str(tmp_path))
    assert LocalFolder(tmp_path).get("counter").data == b"300"


def test_a_reader_never_sees_half_an_object(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from spotlight.store.folder import LocalFolder
store = LocalFolder(Path(sys.argv[1]))
tag = store.put_new("k", b"0" * 1_000_000)
print("up", flush=True)
for i in range(1, 10**6):
    tag = store.put_if("k", b"%d" % (i % 10) * 1_000_000, tag)
"""
    writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout
    assert writer.stdout.readline() == b"up\n"
    store, seen = LocalFolder(tmp_path), set()
    try:
        while len(seen) < 8:
            data = store.get("k").data
            assert len(data) == 1_000_000
            assert data == data[:1] * len(data)
            seen.add(data[:1])
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert len(store.get("k").data) == 1_000_000
    assert store.put_if("k", b"the lock of a killed holder is free", store.get("k").tag)


def test_what_a_killed_writer_staged_is_swept_later(tmp_path: Path) -> None:
    store = LocalFolder(tmp_path)
    store.put_new("k", b"1")
    left, fresh = tmp_path / ".staged" / "dead", tmp_path / ".staged" / "alive"
    for file in (left, fresh):
        file.write_bytes(b"half")
    os.utime(left, (time.time() - 7200,) * 2)
    store.put_new("k2", b"2")
    assert not left.exists()
    assert fresh.exists()
    assert store.list_keys() == ["k", "k2"]


def test_nothing_is_made_by_reading(tmp_path: Path) -> None:
    store = LocalFolder(tmp_path / "none")
    assert store.list_keys() == []
    store.delete("a")
    with pytest.raises(NotFoundError):
        store.get("a")
    assert not (tmp_path / "none").exists()


def test_a_folder_is_no_object(tmp_path: Path) -> None:
    store = LocalFolder(tmp_path)
    store.put_new("a/b", b"")
    for key in ("a", "a/b/c"):
        with pytest.raises(NotFoundError):
            store.get(key)
    assert store.put_new("a", b"") is None
    with pytest.raises((RunError, NotFoundError)):
        store.put_new("a/b/c", b"")
    store.delete("a/b/c")
    assert store.list_keys() == ["a/b"]


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (outside / "secret").write_text("x")
    root.mkdir()
    (root / "way").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    store = LocalFolder(root)
    for use in (
        lambda: store.get("way/secret"),
        lambda: store.put_new("way/new", b""),
        lambda: store.delete("way/secret"),
        lambda: store.list_keys("way"),
        lambda: store.get("file"),
    ):
        with pytest.raises(UserError, match="leaves"):
            use()
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_no_room_is_said_and_costs_nothing(tmp_path: Path) -> None:
    """A real refusal by the kernel: this process may write files of 64 kB at most."""
    store = LocalFolder(tmp_path)
    tag = store.put_new("k", b"before")
    assert tag
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        for write in (
            lambda: store.put_new("big", b"x" * 100_000),
            lambda: store.put_if("k", b"x" * 100_000, tag),
        ):
            with pytest.raises(RunError, match=r"no room .* 100000 bytes to write, [0-9]+ free") as caught:
                write()
            assert "free some space" in str(caught.value.hint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.list_keys() == ["k"]
    assert store.get("k").data == b"before"
    assert list((tmp_path / ".staged").iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_each_refusal_of_the_disk_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = LocalFolder(tmp_path)
    store.put_new("k", b"before")

    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    wanted = "no room" if code in (errno.ENOSPC, errno.EDQUOT) else os.strerror(code)
    with pytest.raises(RunError, match=wanted):
        store.put_new("new", b"x")
    assert store.list_keys() == ["k"]
    assert list((tmp_path / ".staged").iterdir()) == []
