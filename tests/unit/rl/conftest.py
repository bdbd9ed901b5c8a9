"""Tiny random checkpoints of the real pipelines, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fakes import adapter_contract as contract


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By kind: a folder that has the adapter's name."""
    return cache(lambda kind: contract.save(kind, tmp_path_factory.mktemp("models")))
