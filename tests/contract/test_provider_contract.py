"""One contract for everything that gives machines: this host, the fake cloud; SkyPilot keeps it in a cloud in a box.

What SkyPilot's machines go through there (`tests/cloud/test_provider_in_box.py`) is `provider_life`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_cloud import FakeCloud
from provider_life import whole_life

from spotlight.provision.base import NodeInfo, NodeSpec, NodeState, Role
from spotlight.provision.local import LocalProvider

SPOT = NodeSpec(name="s0", role=Role.SPOT)


@pytest.fixture(params=["local", "fake"])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    found = (
        LocalProvider(command=lambda _: sleeper, log_dir=tmp_path, environment={})
        if request.param == "local"
        else FakeCloud()
    )
    yield found
    found.close()


def only(provider: Any, name: str = "s0") -> NodeInfo:
    (info,) = (info for info in provider.list() if info.name == name)
    return info


def test_nothing_is_listed_before_it_was_asked_for(provider: Any) -> None:
    assert provider.list() == []


def test_a_launched_node_is_listed_with_role_and_instance(provider: Any) -> None:
    provider.launch(SPOT)
    info = only(provider)
    assert (info.role, info.state, info.reason) == (Role.SPOT, NodeState.UP, "")
    assert info.instance


def test_launching_a_living_name_again_changes_nothing(provider: Any) -> None:
    provider.launch(SPOT)
    before = only(provider)
    provider.launch(SPOT)
    assert only(provider) == before


def test_terminate_ends_and_says_that_it_was_us(provider: Any) -> None:
    provider.launch(SPOT)
    provider.terminate("s0")
    info = only(provider)
    assert info.state is NodeState.GONE
    assert info.reason
    assert not info.interrupted


def test_what_the_provider_takes_is_interrupted(provider: Any) -> None:
    provider.launch(SPOT)
    provider.kill("s0")
    info = only(provider)
    assert info.state is NodeState.GONE
    assert info.interrupted


def test_terminating_what_is_gone_or_never_was_is_no_error(provider: Any) -> None:
    provider.terminate("s9")
    provider.launch(SPOT)
    provider.terminate("s0")
    provider.terminate("s0")
    assert only(provider).state is NodeState.GONE


def test_a_name_outlives_its_machine(provider: Any) -> None:
    provider.launch(SPOT)
    first = only(provider).instance
    provider.kill("s0")
    provider.launch(SPOT)
    info = only(provider)
    assert info.state is NodeState.UP
    assert info.instance != first


def test_nodes_are_independent(provider: Any) -> None:
    for name in ("s0", "s1"):
        provider.launch(NodeSpec(name=name, role=Role.SPOT))
    provider.kill("s0")
    assert only(provider, "s1").state is NodeState.UP


def test_the_life_that_the_real_cloud_is_put_through(provider: Any) -> None:
    whole_life(provider, kill=lambda machine: provider.kill(machine.name))
