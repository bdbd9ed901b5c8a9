"""Lines survive a killed writer, a full disk and foreign bytes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spotlight.observe import jsonl


def test_round_trip(tmp_path: Path) -> None:
    lines = jsonl.JsonLines(tmp_path / "a" / "x.jsonl")
    records = [{"text": 'é 漢 \u2028 \U0001f600 "\n\r', "n": 1}, {"nested": {"list": [1, None, True]}}]
    assert all(lines.append(record) for record in records)
    assert list(jsonl.read(lines.path)) == records
    lines.close()
    lines.close()


def test_each_record_is_on_disk_at_once(tmp_path: Path) -> None:
    lines = jsonl.JsonLines(tmp_path / "x.jsonl")
    lines.append({"a": 1})
    assert lines.path.read_text() == '{"a":1}\n'


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_writer_killed_at_any_byte_costs_one_line(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.jsonl"
    first, second = '{"a":1}\n', '{"b":2}\n'
    path.write_text(first + second[:cut])
    after = jsonl.JsonLines(path)
    after.append({"c": 3})
    # Only the line break missing: the record itself is whole.
    expected = [{"a": 1}] + ([{"b": 2}] if cut >= len(second) - 1 else []) + [{"c": 3}]
    assert list(jsonl.read(path)) == expected


def test_numbers_that_json_cannot_hold(tmp_path: Path) -> None:
    lines = jsonl.JsonLines(tmp_path / "x.jsonl")
    lines.append(
        {"nan": float("nan"), "inf": [float("-inf")], "f": np.float32(0.5), "i": np.int64(3), "p": Path("a")}
    )
    assert json.loads(lines.path.read_text()) == {"nan": None, "inf": [None], "f": 0.5, "i": 3, "p": "a"}


def test_surrogates_do_not_stop_a_run(tmp_path: Path) -> None:
    lines = jsonl.JsonLines(tmp_path / "x.jsonl")
    assert lines.append({"name": b"\xff".decode("utf-8", "surrogateescape")})
    assert len(list(jsonl.read(lines.path))) == 1


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    deep = b'{"a":' + b"[" * 100_000
    path.write_bytes(b'{"a":1}\n\n[1]\nnull\n{"a"\n\xff\xfe\n' + deep + b'\n{"b":2}\n')
    assert list(jsonl.read(path)) == [{"a": 1}, {"b": 2}]
    assert list(jsonl.read(tmp_path / "none.jsonl")) == []


def test_an_oversized_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_CHARS", 50)
    path = tmp_path / "x.jsonl"
    path.write_text('{"a":"' + "x" * 500 + '"}\n{"b":2}\n')
    assert list(jsonl.read(path)) == [{"b": 2}]


def test_batches_give_what_is_new_and_wait_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    batches = jsonl.batches(path)
    assert next(batches) == []
    path.write_text('{"a":1}\n[]\n{"b"')
    assert next(batches) == [{"a": 1}]
    assert next(batches) == []
    with path.open("a") as file:
        file.write(':2}\n{"c":3}\n')
    assert next(batches) == [{"b": 2}, {"c": 3}]


class FullDisk:
    """A file that takes half a line and fails as long as there is no room."""

    def __init__(self, real: Any, state: dict[str, bool]) -> None:
        self.real, self.state = real, state

    def write(self, text: str) -> int:
        if self.state["full"]:
            self.real.write(text[: len(text) // 2])
            self.real.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self.real.write(text))

    def flush(self) -> None:
        self.real.flush()

    def close(self) -> None:
        self.real.close()


def test_a_full_disk_is_counted_and_said_and_the_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"full": False}
    real_open = Path.open

    def opening(path: Path, mode: str = "r", **options: Any) -> Any:
        file = real_open(path, mode, **options)
        return FullDisk(file, state) if mode == "a" else file

    monkeypatch.setattr(Path, "open", opening)
    lines = jsonl.JsonLines(tmp_path / "x.jsonl")
    assert lines.append({"n": 1})
    state["full"] = True
    assert not lines.append({"n": 2})
    assert not lines.append({"n": 3})
    assert lines.lost == 2
    assert lines.problem == "x.jsonl: No space left on device"
    state["full"] = False
    assert lines.append({"n": 4})
    assert [record["n"] for record in jsonl.read(lines.path)] == [1, 4]


def test_a_folder_that_cannot_be_made_is_no_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines = jsonl.JsonLines(tmp_path / "file" / "x.jsonl")
    assert not lines.append({"a": 1})
    assert lines.lost == 1
