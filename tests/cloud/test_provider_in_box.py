"""Real SkyPilot keeps the provider contract, and goes on to the next zone when one has no machine."""

from __future__ import annotations

import pytest
from box import HERE, Box
from laptop import Laptop

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_skypilot_keeps_the_provider_contract(laptop: Laptop, box: Box) -> None:
    with box.refusing({"us-east-1a": "InsufficientInstanceCapacity"}):
        told = laptop.script(HERE / "live_once.py", str(box.folder))
    laptop.phase("provider contract")
    print(told)
    for part in ("launched", "again changes nothing", "taken, alone", "launched again", "ended by us"):
        assert part in told
    assert told.splitlines()[-1] == "{'s0': 'us-east-1b', 's1': 'us-east-1b'}"
    assert laptop.machines() == {}
