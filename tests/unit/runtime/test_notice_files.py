"""Notices from a file: each one is news once, and so is its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotlight.runtime.notices import FileNotice, Interruption, Watch, announce


def test_a_notice_is_news_once_and_its_withdrawal_too(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "s0.json"
    watch = Watch([FileNotice(path)])
    assert watch.news() == (None, False)
    announce(path, 30.0)
    assert watch.news() == (Interruption(30.0, "file"), False)
    assert watch.news() == (None, False)
    announce(path, 20.0)
    assert watch.news() == (Interruption(20.0, "file"), False)
    path.unlink()
    assert watch.news() == (None, True)
    assert watch.news() == (None, False)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"deadline_s": "soon"}', '{"deadline_s": -5}', "\x00"])
def test_a_file_that_cannot_be_read_leaves_no_time(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s0.json"
    path.write_text(text)
    assert FileNotice(path).poll() == Interruption(0.0, "file")


def test_the_nearest_of_several_notices_counts(tmp_path: Path) -> None:
    announce(tmp_path / "a", 120.0)
    announce(tmp_path / "b", 30.0)
    notice, _ = Watch([FileNotice(tmp_path / "a"), FileNotice(tmp_path / "b")]).news()
    assert notice == Interruption(30.0, "file")
