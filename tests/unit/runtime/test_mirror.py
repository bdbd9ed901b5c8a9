"""A run's files in its bucket: what is sent arrives, nothing leaves the folder, an outage is caught up."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotlight.errors import RunError, UserError
from spotlight.runtime import mirror
from spotlight.runtime.mirror import Mirror
from spotlight.store.objects import open_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "head"
    (path / "journal").mkdir(parents=True)
    (path / "progress.jsonl").write_text("one\n")
    (path / "journal" / "0.jsonl").write_text("{}\n")
    return path


def test_what_the_run_tells_arrives_and_grows(folder: Path, tmp_path: Path) -> None:
    store = open_store("memory://")
    sender = Mirror(folder, store)
    sender.send(everything=False)
    assert mirror.fetch(store, tmp_path / "laptop") == ["progress.jsonl"]
    assert mirror.fetch(store, tmp_path / "laptop") == []
    (folder / "progress.jsonl").write_text("one\ntwo\n")
    sender.close()
    assert mirror.fetch(store, tmp_path / "laptop", everything=True) == ["journal/0.jsonl", "progress.jsonl"]
    assert (tmp_path / "laptop" / "progress.jsonl").read_text() == "one\ntwo\n"


def test_a_new_head_goes_on_where_the_old_one_stopped(folder: Path, tmp_path: Path) -> None:
    store = open_store("memory://")
    Mirror(folder, store).send(everything=False)
    (folder / "progress.jsonl").write_text("newer\n")
    Mirror(folder, store).send(everything=False)
    mirror.fetch(store, tmp_path / "laptop")
    assert (tmp_path / "laptop" / "progress.jsonl").read_text() == "newer\n"


class Flaky:
    """A store that fails once."""

    def __init__(self) -> None:
        self.store = open_store("memory://")
        self.url, self.failures = self.store.url, 1

    def put_new(self, key: str, data: bytes) -> str | None:
        if self.failures:
            self.failures -= 1
            raise RunError("503")
        return self.store.put_new(key, data)


def test_an_outage_is_caught_up_with(folder: Path) -> None:
    flaky = Flaky()
    sender = Mirror(folder, flaky)  # type: ignore[arg-type]
    sender.send(everything=False)
    assert flaky.store.list_keys("run") == []
    sender.send(everything=False)
    assert flaky.store.list_keys("run") == ["run/progress.jsonl"]


def test_links_are_not_followed_and_nothing_leaves_the_folder(folder: Path, tmp_path: Path) -> None:
    store = open_store("memory://")
    (tmp_path / "secret").write_text("s3cret")
    (folder / "metrics.jsonl").symlink_to(tmp_path / "secret")
    Mirror(folder, store).send(everything=True)
    assert "run/metrics.jsonl" not in store.list_keys("run")
    laptop = tmp_path / "laptop"
    laptop.mkdir()
    (laptop / "journal").symlink_to(tmp_path)
    with pytest.raises(UserError, match="leaves"):
        mirror.fetch(store, laptop, everything=True)
