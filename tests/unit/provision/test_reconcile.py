"""What the reconciler does about a cloud that says no, hangs, half-launches, takes and forgets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from random import Random

import pytest
from fakes.fake_cloud import FakeCloud

from spotlight.core.zones import BackOff, ZoneBook
from spotlight.errors import CapacityError, CredentialError, PreconditionError, QuotaError
from spotlight.provision.base import NodeSpec, NodeState, Role
from spotlight.provision.reconcile import Reconciler


class World:
    """A reconciler over a fake cloud, with a clock of its own."""

    def __init__(self) -> None:
        self.cloud = FakeCloud()
        self.now = 0.0
        self.said: list[str] = []
        self.zones = ZoneBook(("za", "zb"), Random(0), BackOff(first_s=30, max_s=900, flap_s=120))
        self.reconciler = Reconciler(self.cloud, self.zones, say=self.said.append, clock=lambda: self.now)

    def wish(self, *names: str) -> None:
        for name in names:
            self.reconciler.launch(NodeSpec(name=name, role=Role.SPOT))

    def look(self, after_s: float = 0.0) -> None:
        """One look once all attempts under way have ended, and one more that takes them in."""
        self.now += after_s
        self.reconciler.step()
        self.settle()
        self.reconciler.step()

    def settle(self) -> None:
        until(lambda: self.cloud.at_once == 0)

    def states(self) -> dict[str, NodeState]:
        return {info.name: info.state for info in self.reconciler.list()}


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert ready()
    time.sleep(0.02)  # a future is done a moment after its function


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    yield found
    if found.cloud.gate:
        found.cloud.gate.set()
    found.reconciler.close()


def test_wishes_come_true(world: World) -> None:
    world.wish("s0", "s1")
    world.look()
    assert world.states() == {"s0": NodeState.UP, "s1": NodeState.UP}
    world.look(60)
    assert len(world.cloud.launches) == 2


def test_one_of_four_vanishes_and_only_that_one_is_launched_again(world: World) -> None:
    world.wish("s0", "s1", "s2", "s3")
    world.look()
    world.cloud.kill("s2")
    world.look(600)
    assert [spec.name for spec in world.cloud.launches[4:]] == ["s2"]
    assert set(world.states().values()) == {NodeState.UP}


def test_a_loss_is_shown_before_the_replacement(world: World) -> None:
    world.wish("s0")
    world.look()
    world.cloud.gate = threading.Event()
    world.cloud.kill("s0")
    world.now += 600
    world.reconciler.step()
    (info,) = world.reconciler.list()
    assert (info.state, info.interrupted) == (NodeState.GONE, True)


def test_no_capacity_backs_off_longer_each_time(world: World) -> None:
    world.cloud.answers = [CapacityError("none"), CapacityError("none"), None]
    world.wish("s0")
    world.look()
    assert "no capacity" in world.said[0]
    world.look(10)
    assert len(world.cloud.launches) == 1
    world.look(30)
    assert len(world.cloud.launches) == 2
    world.look(31)  # the second rest is at least 40 s
    assert len(world.cloud.launches) == 2
    world.look(60)
    assert world.states() == {"s0": NodeState.UP}


def test_no_quota_gives_the_region_up_and_keeps_what_is_there(world: World) -> None:
    world.wish("s0")
    world.look()
    world.cloud.answers = [QuotaError("limit 8, asked 16")]
    world.wish("s1")
    world.look()
    world.look(1e6)
    assert [spec.name for spec in world.cloud.launches] == ["s0", "s1"]
    assert world.states()["s0"] is NodeState.UP
    assert "limit 8" in world.said[0]


def test_a_lost_login_is_not_tried_on(world: World) -> None:
    world.cloud.answers = [CredentialError("expired")]
    world.wish("s0")
    world.look()
    world.look(1e6)
    assert len(world.cloud.launches) == 1


def test_a_failed_launch_of_any_other_kind_is_tried_again(world: World) -> None:
    world.cloud.answers = [PreconditionError("ssh timed out")]
    world.wish("s0")
    world.look()
    world.look(40)
    assert world.states() == {"s0": NodeState.UP}


def test_a_half_launched_machine_is_the_node_and_not_paid_twice(world: World) -> None:
    world.cloud.answers, world.cloud.half = [PreconditionError("half")], True
    world.wish("s0")
    world.look()
    world.look(100)
    assert world.states() == {"s0": NodeState.UP}
    assert len(world.cloud.launches) == 1


def test_a_zone_that_flaps_rests(world: World) -> None:
    world.wish("s0")
    world.look()
    world.cloud.kill("s0")
    world.look(5)
    assert world.cloud.launches[1].zones == ("zb",)


def test_at_most_four_launches_are_under_way(world: World) -> None:
    world.cloud.gate = threading.Event()
    world.wish(*(f"s{i}" for i in range(10)))
    for _ in range(3):
        world.reconciler.step()
    until(lambda: world.cloud.at_once == 4)
    world.cloud.gate.set()
    world.look()
    world.look()
    world.look()
    assert world.cloud.most_at_once == 4
    assert len(world.states()) == 10


def test_a_node_that_the_cloud_forgot_is_gone(world: World) -> None:
    world.wish("s0")
    world.look()
    world.cloud.forget("s0")
    world.cloud.gate = threading.Event()
    world.now += 600
    world.reconciler.step()
    assert world.states() == {"s0": NodeState.GONE}


def test_close_ends_machines_and_those_that_were_still_being_launched(world: World) -> None:
    world.wish("s0")
    world.look()
    world.cloud.gate = threading.Event()
    world.wish("s1")
    world.reconciler.step()
    until(lambda: world.cloud.at_once == 1)
    closing = threading.Thread(target=world.reconciler.close)
    closing.start()
    world.cloud.gate.set()
    closing.join(20)
    assert not any(world.cloud.is_alive(name) for name in ("s0", "s1"))


def test_a_wish_taken_back_is_ended_and_not_asked_for_again(world: World) -> None:
    world.wish("s0")
    world.look()
    world.reconciler.terminate("s0")
    world.look(1e6)
    assert not world.cloud.is_alive("s0")
    assert len(world.cloud.launches) == 1


def test_a_wish_taken_back_during_its_launch_leaves_no_machine(world: World) -> None:
    world.cloud.gate = threading.Event()
    world.wish("s0")
    world.reconciler.step()
    until(lambda: world.cloud.at_once == 1)
    world.reconciler.terminate("s0")
    world.cloud.machines.clear()  # the order was withdrawn too late: the machine comes after its end
    world.cloud._boot(world.cloud.launches[0])
    world.cloud.gate.set()
    world.reconciler.close()
    assert not world.cloud.is_alive("s0")
