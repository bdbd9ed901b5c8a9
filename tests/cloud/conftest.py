"""One cloud in a box for all tests here; where there can be none they skip and say why."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "box"))

from box import Box, missing


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    if why := missing():
        pytest.skip(f"no cloud in a box: {why}")
    found = Box(Path(os.environ.get("SPOTLIGHT_BOX", "/run/spotlight-box")))
    try:
        found.start()
        yield found
    finally:
        found.stop()
