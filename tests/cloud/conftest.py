"""One cloud in a box for all tests here; where there can be none they skip and say why."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "box"))

from box import Box, missing
from laptop import Laptop


class Phases:
    """Prints how long each phase took."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        print(f"{now - self._began:7.1f} s  {what}", flush=True)
        self._began = now


@pytest.fixture(scope="session")
def phase() -> Phases:
    return Phases()


@pytest.fixture(scope="session")
def box(phase: Phases) -> Iterator[Box]:
    if why := missing():
        pytest.skip(f"no cloud in a box: {why}")
    before = set(Path("/tmp").iterdir())
    found = Box(Path(os.environ.get("SPOTLIGHT_BOX", "/run/spotlight-box")))
    try:
        found.start(phase)
        yield found
    finally:
        found.stop()
        phase("box ended")
    assert found.traces() == []
    sky = [path for path in set(Path("/tmp").iterdir()) - before if "sky" in path.name]
    assert sky == []


@pytest.fixture(scope="session")
def laptop(box: Box, phase: Phases) -> Laptop:
    return Laptop(box, phase)
