"""The journal loses nothing that it can keep, and says what it could not."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
from fakes.scheduler_world import world

from spotlight.errors import DataError, LockError, NotFoundError
from spotlight.observe import journal
from spotlight.observe.journal import Journal, next_first_token, read, segments
from spotlight.observe.verify import replay, verify


def fill(folder, count, **options):
    writer = Journal(folder, **options)
    for number in range(count):
        assert writer.append({"type": "test", "number": number})
    return writer


def numbers(folder):
    return [record["number"] for record in read(folder) if record["type"] == "test"]


def test_what_is_written_reads_back_in_order(tmp_path):
    writer = fill(tmp_path, 100)
    records = list(read(tmp_path))  # beside the live writer
    assert [record["number"] for record in records] == list(range(100))
    assert [record["seq"] for record in records] == list(range(1, 101))
    assert all(record["v"] == 1 and record["utc"] > 1.6e9 for record in records)
    writer.close()
    writer.append({"type": "test", "number": 100})
    assert numbers(tmp_path) == list(range(101))


def test_segments_rotate_and_stay_in_order(tmp_path):
    fill(tmp_path, 300, segment_bytes=1000)
    assert len(segments(tmp_path)) > 10
    assert all(path.stat().st_size <= 1000 for path in segments(tmp_path))
    assert numbers(tmp_path) == list(range(300))


def test_a_record_larger_than_a_segment_gets_one_of_its_own(tmp_path):
    writer = Journal(tmp_path, segment_bytes=100)
    writer.append({"type": "test", "number": 0, "text": "x" * 1000})
    writer.append({"type": "test", "number": 1})
    assert numbers(tmp_path) == [0, 1]


def test_a_new_writer_goes_on_in_a_new_segment(tmp_path):
    fill(tmp_path, 3).close()
    fill(tmp_path, 2)
    assert len(segments(tmp_path)) == 2
    assert [record["seq"] for record in read(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("cut", range(2, 40, 3))
def test_a_writer_killed_at_any_byte_leaves_a_journal_that_reads(tmp_path, cut):
    fill(tmp_path, 5).close()
    (path,) = segments(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    assert numbers(tmp_path) == [0, 1, 2, 3]
    fill(tmp_path, 2)
    records = list(read(tmp_path))
    assert [record["number"] for record in records] == [0, 1, 2, 3, 0, 1]
    assert [record["seq"] for record in records] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken\n", "line 2: not JSON"),
        (b"\xff\xfe\x00\n", "line 2: not JSON"),
        (b"[" * 5000 + b"\n", "line 2: not JSON"),
        (b"[1]\n", "line 2: not a journal record"),
        (b'{"v":1,"seq":9}\n', "line 2: not a journal record"),
        (b'{"v":2,"seq":9,"type":"on"}\n', "line 2: schema 2, this reads 1"),
    ],
)
def test_a_spoilt_line_is_an_error_that_names_file_and_line(tmp_path, line, message):
    fill(tmp_path, 3).close()
    (path,) = segments(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + line + b"".join(lines[1:]))
    with pytest.raises(DataError, match=f"{path.name}, {message}"):
        list(read(tmp_path))
    fill(tmp_path, 1)  # a spoilt old segment does not stop a new coordinator
    assert next(iter(journal._read_segment(segments(tmp_path)[-1])))["seq"] == 4


def test_no_journal_is_not_found(tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(NotFoundError):
            list(read(folder))


def test_what_is_not_json_is_refused_and_nothing_is_written(tmp_path):
    writer = Journal(tmp_path)
    for value in (float("nan"), object(), {1, 2}):
        with pytest.raises((ValueError, TypeError)):
            writer.append({"type": "test", "value": value})
    writer.append({"type": "test", "number": 1, "seq": 77, "v": 9, "text": "\ud800 ☃ \x00\n"})
    (record,) = read(tmp_path)
    assert (record["seq"], record["v"]) == (1, 1)


def test_two_writers_at_once_are_refused(tmp_path, monkeypatch):
    first = Journal(tmp_path)
    monkeypatch.setattr(journal, "segments", lambda folder: [])  # the second looked before the first began
    with pytest.raises(LockError):
        Journal(tmp_path)
    first.close()


FULL_DISK = """
import json, logging, resource, signal, sys
from pathlib import Path
from spotlight.observe.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logging.basicConfig(stream=sys.stderr, format="%(message)s")
writer = Journal(Path(sys.argv[1]))
said = []
for number in range(30):
    if number == 10:  # no file may grow beyond this: writes are cut in the middle of a line
        resource.setrlimit(resource.RLIMIT_FSIZE, (writer._size + 100, resource.RLIM_INFINITY))
    if number == 20:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said.append(writer.append({"type": "test", "number": number}))
print(json.dumps({"said": said, "lost": writer.lost, "problem": writer.problem}))
"""


def test_a_full_disk_is_said_once_and_survived(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    written = [number for number, ok in enumerate(answer["said"]) if ok]
    assert set(range(10)) < set(written)
    assert set(range(20, 30)) < set(written)
    assert answer["lost"] == 30 - len(written) > 5
    assert answer["problem"] is None
    assert done.stderr.count("the run goes on without it") == 1
    assert done.stderr.count("writing again") == 1
    assert numbers(tmp_path) == written
    gaps = [record for record in read(tmp_path) if record["type"] == "gap"]
    assert sum(gap["lost"] for gap in gaps) == answer["lost"]
    assert gaps[0]["reason"] == "File too large"


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path, caplog):
    writer = Journal(tmp_path)
    os.close(writer._fd)
    with caplog.at_level(logging.ERROR):
        assert not writer.append({"type": "test"})
        writer._fd = -1
        assert writer.append({"type": "test"})
    assert "goes on without it" in caplog.text
    assert [record["type"] for record in read(tmp_path)] == ["gap", "test"]


@pytest.mark.parametrize(("policy", "calls"), [("always", 5), ("interval", 1), ("never", 0)])
def test_the_disk_is_asked_as_often_as_the_policy_says(tmp_path, monkeypatch, policy, calls):
    asked = []
    monkeypatch.setattr(journal.os, "fsync", asked.append)
    writer = fill(tmp_path, 5, fsync=policy, fsync_every_s=0.0)
    writer.sync()
    assert len(asked) == calls


def test_tokens_of_a_new_coordinator_are_above_all_earlier_ones(tmp_path):
    assert next_first_token(tmp_path) == 1
    writer = Journal(tmp_path)
    writer.append({"type": "start"})
    assert next_first_token(tmp_path) == 2**32 + 1
    writer.append({"type": "start"})
    assert next_first_token(tmp_path) == 2 * 2**32 + 1


def test_verify_and_replay_read_the_journal_alone(tmp_path):
    w = world("a")
    w.submit(2)
    for grant in w.pull("a", 2):
        w.commit(grant)
    writer = Journal(tmp_path)
    for record in w.records:
        writer.append(record)
    names = [verdict.name.split()[0] for verdict in verify(tmp_path)]
    assert names == [f"INV-{number}" for number in range(1, 8)]
    assert all(verdict.ok for verdict in verify(tmp_path))
    assert replay(tmp_path).ok
    writer.append(w.records[-1])  # the last commit once more
    assert [verdict.name for verdict in verify(tmp_path) if not verdict.ok][1] == "INV-2 one commit"
    assert not replay(tmp_path).ok
