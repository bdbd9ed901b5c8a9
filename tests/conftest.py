"""Shared by all tests: one thread per process, hub offline, a fresh home per test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How fast the machine is decides no test.
settings.register_profile("spotlight", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("spotlight")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two contending threads are 10x slower than one
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A suite started in the background inherits an ignored Ctrl-C and would pass that on to what it tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def spotlight_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test gets its own $SPOTLIGHT_HOME."""
    home = tmp_path / "home"
    monkeypatch.setenv("SPOTLIGHT_HOME", str(home))
    return home
