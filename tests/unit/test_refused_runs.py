"""A run that cannot be is refused before anything of it exists: one clear error, no folder, no process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotlight import api, config
from spotlight.errors import ConfigError, DataError, NotFoundError, SpotlightError, UserError

NOT_UTF8 = os.fsdecode(b"\xff\xfe")


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        (["reward.train={}"], ConfigError, "weight other than 0"),
        (["reward.train={ocr_soft: 0, ocr: -0.0}"], ConfigError, "weight other than 0"),
        (["reward.train={ocr_soft: .nan}"], ConfigError, "finite"),
        (["reward.train={orc: 1}"], ConfigError, "did you mean 'ocr'"),
        (["reward.train={nothing.of.the.kind:score: 1}"], ConfigError, "cannot import"),
        (["reward.train={':': 1}"], ConfigError, "cannot import"),
        (["reward.train={'': 1}"], ConfigError, "unknown reward"),
        (["reward.held_out=clipp"], ConfigError, "did you mean 'clip'"),
        (["reward.held_out=ocr@folder"], ConfigError, "unknown reward"),
        (["model.kind=tinny"], ConfigError, "did you mean 'tiny'"),
        (["model.path=/no/such/folder"], NotFoundError, "/no/such/folder"),
        (["data.train=missing.txt"], DataError, "missing.txt"),
        (["data.train=/"], DataError, "unknown kind"),
        ([f"data.train={NOT_UTF8}"], ConfigError, "not UTF-8"),
        ([f"{NOT_UTF8}=1"], ConfigError, "not UTF-8"),
    ],
)
def test_parts_that_are_not_there(
    overrides: list[str], kind: type[SpotlightError], words: str, spotlight_home: Path
) -> None:
    with pytest.raises(kind) as caught:
        api.train(config.load("tiny", overrides), name="run")
    told = f"{caught.value.message} {caught.value.hint}"
    assert words in told
    told.encode()
    assert not spotlight_home.exists()


@pytest.mark.parametrize("name", ["", " ", "Run", "a\n", "../x", "a" * 25, "ü", NOT_UTF8, "a; rm -rf ~"])
def test_names_that_are_none(name: str, spotlight_home: Path) -> None:
    with pytest.raises(UserError, match="bad run name"):
        api.train(config.load("tiny"), name=name)
    assert not spotlight_home.exists()


def test_a_reward_of_the_users_own_is_looked_for_but_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spotlight_home: Path
) -> None:
    (tmp_path / "loud_reward.py").write_text("raise SystemExit('imported too early')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError):  # the next thing that is looked for
        api.train(config.load("tiny", ["reward.train={loud_reward:score: 1}", "data.train=missing.txt"]))
    assert not spotlight_home.exists()
