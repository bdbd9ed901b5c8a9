"""The command line against a hand-written api."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import fake_api

import spotlight
from spotlight_cli.main import main


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, in place of the real api for one test."""
    fake_api.reset()
    monkeypatch.setitem(sys.modules, "spotlight.api", fake_api)
    monkeypatch.setattr(spotlight, "api", fake_api, raising=False)
    return fake_api


@pytest.fixture
def run(api: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process."""

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call
