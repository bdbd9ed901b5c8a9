"""The stand-in keeps to the real api: same names, same parameters, same defaults."""

from __future__ import annotations

import inspect

import pytest
from fakes import fake_api

from spotlight import api
from spotlight.core import verdict


@pytest.mark.parametrize(
    "name",
    [
        "train",
        "plan",
        "launch",
        "down",
        "refresh",
        "check_cloud",
        "sample",
        "export",
        "verify",
        "status",
        "report",
    ],
)
def test_signatures_agree(name: str) -> None:
    def shape(function: object) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [(p.name, p.kind, p.default) for p in parameters]

    assert shape(getattr(fake_api, name)) == shape(getattr(api, name))


def test_verdicts_agree() -> None:
    names = set(inspect.signature(verdict.Verdict).parameters)
    assert names == set(inspect.signature(fake_api.Verdict).parameters)
