"""Preemption traces: read it, or say which line is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotlight.errors import DataError
from spotlight.runtime.preempt import Preemption, load


def read(tmp_path: Path, text: str | bytes) -> list[Preemption]:
    path = tmp_path / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(str(path), iterations=9, nodes=["s0", "s1"])


def test_times_count_from_the_start_or_from_an_iteration(tmp_path: Path) -> None:
    found = read(tmp_path, "time,node,notice_s\n12.5,s0,0\nit4,s1,2\nit4+0.5,s0,-30\n")
    assert found == [
        Preemption(0, 12.5, "s0", 0.0),
        Preemption(4, 0.0, "s1", 2.0),
        Preemption(4, 0.5, "s0", -30.0),
    ]
    assert [p.false_alarm for p in found] == [False, False, True]


def test_bom_crlf_blank_lines_and_spaces_are_fine(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbftime, node, notice_s\r\n\r\n 3 , s1 ,\r\n") == [
        Preemption(0, 3.0, "s1", 0.0)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ":1: the first line"),
        ("time,node\n1,s0\n", ":1: the first line"),
        ("time,node,notice_s\n1,s0\n", ":2: 2 fields"),
        ("time,node,notice_s\nsoon,s0,0\n", ":2: bad time 'soon'"),
        ("time,node,notice_s\n-1,s0,0\n", ":2: bad time"),
        ("time,node,notice_s\n,s0,0\n", ":2: bad time"),
        ("time,node,notice_s\nit99999999999,s0,0\n", ":2: bad time"),
        ("time,node,notice_s\nit3.5,s0,0\n", ":2: bad time"),
        ("time,node,notice_s\n1+it3,s0,0\n", ":2: bad time"),
        ('time,node,notice_s\n"1\n2",s0,0\n', ":2: 1 fields"),
        ("time,node,notice_s\n" + "9" * 200_000 + ",s0,0\n", ":2: bad time"),
        ("time,node,notice_s\n" + "1,s0,0\n" * 100_001, "more than 100000 lines"),
        ("time,node,notice_s\n1,od0,0\n", ":2: no spot node 'od0'"),
        ("time,node,notice_s\n1,s0,0\n1,s0,nan\n", ":3: notice_s"),
        ("time,node,notice_s\n1,s0,x\n", ":2: bad notice_s"),
        (b"time,node,notice_s\n\xff\n", "not UTF-8"),
    ],
)
def test_a_bad_trace_names_file_and_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, text)
    assert words in caught.value.message
    assert len(caught.value.message) < 300


def test_a_missing_file_and_none_and_demo() -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load("/no/such/trace", iterations=9, nodes=["s0"])
    assert load(None, iterations=9, nodes=["s0"]) == []
    assert load("none", iterations=9, nodes=["s0"]) == []
    assert load("demo", iterations=9, nodes=[]) == []
    (one,) = load("demo", iterations=9, nodes=["s0", "s1"])
    assert (one.iteration, one.node, one.notice_s) == (3, "s1", 0.0)
