"""What the books, the journal and the user are told when a node is lost: taken, broken, or never come up."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.direct_coordinator import DirectCoordinator

from spotlight.config import BudgetConfig
from spotlight.core.ledger import ledger_from_records
from spotlight.observe import journal
from spotlight.observe.meter import RunMeter
from spotlight.observe.verify import replay, verify
from spotlight.provision.base import NodeInfo, NodeState, Role
from spotlight.runtime.accounts import Accounts
from spotlight.runtime.fleet import Fleet

REQUEST = {"kind": "final", "sample": "it1/row1/s0", "batch_key": "k", "num_steps": 4}


class Machines:
    """A provider whose machines come up at once and end when the test says so."""

    def __init__(self) -> None:
        self.machines: dict[str, NodeInfo] = {}
        self.launches = 0

    def launch(self, spec: Any) -> None:
        self.launches += 1
        instance = f"{spec.name}-{self.launches}"
        self.machines[spec.name] = NodeInfo(
            name=spec.name, role=Role.SPOT, instance=instance, state=NodeState.UP
        )

    def list(self) -> list[NodeInfo]:
        return list(self.machines.values())

    def terminate(self, name: str) -> None:
        self.end(name, "terminated", interrupted=False)

    def end(self, name: str, reason: str, *, interrupted: bool) -> None:
        gone = replace(self.machines[name], state=NodeState.GONE, reason=reason, interrupted=interrupted)
        self.machines[name] = gone


class NoRay:
    """A session in which no node ever joins Ray: explorers are the test's own."""

    def node_ids(self) -> dict[str, str]:
        return {}


class Stage:
    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal"
        self.told: list[dict[str, Any]] = []
        self.machines = Machines()
        self.coordinator = DirectCoordinator(self.journal, {"flap_life_s": 0.0})
        self.accounts = Accounts(self.journal, BudgetConfig())
        self.accounts.through(self.coordinator)
        self.fleet = Fleet(
            NoRay(),  # type: ignore[arg-type]
            provider=self.machines,
            num_spot=1,
            shared_out=[(0,)],
            told={"root": str(folder)},
            coordinator=self.coordinator,
            respawn_s=0.0,
            preemptions=[],
            emit=lambda event: self.told.append(dict(event)),
            accounts=self.accounts,
        )
        self.coordinator.call("publish", 0, "d", 3)
        self.fleet.start()

    def serve(self) -> list[dict[str, Any]]:
        """The node's worker joins and pulls; what it is granted."""
        epoch = self.coordinator.call("register", "s0/0", "s0", "spot")["epoch"]
        self.coordinator.call("admitted", "s0/0", epoch, 0, "d", 3)
        grants: list[dict[str, Any]] = self.coordinator.call("pull", "s0/0", epoch, 1, 0.0)["grants"]
        return grants

    def lose(self, reason: str, *, interrupted: bool) -> dict[str, Any]:
        """End the machine and wait until it was launched again; what was told of the loss."""
        launches = self.machines.launches
        self.machines.end("s0", reason, interrupted=interrupted)
        deadline = time.monotonic() + 30
        while self.machines.launches == launches:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [event for event in self.told if event["state"] == "lost"][-1]

    def finish(self) -> RunMeter:
        """End the run; the figures of its journal, which must be in order."""
        self.fleet.close()
        self.fleet.release()
        self.coordinator.call("stop", "test over")
        self.coordinator.close()
        self.accounts.close()
        for verdict in [*verify(self.journal), replay(self.journal)]:
            assert verdict.ok, (verdict, verdict.problems)
        meter = RunMeter(self.journal)
        meter.catch_up()
        return meter

    def ends(self) -> list[str | None]:
        ledger = ledger_from_records(journal.read(self.journal))
        return [interval.end_reason for interval in ledger.intervals]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_node_that_never_came_up_is_neither_a_preemption_nor_anybodys_fault(stage: Stage) -> None:
    stage.coordinator.call("submit", [REQUEST])
    for _ in range(4):
        told = stage.lose("process ended with code 1", interrupted=False)
        assert (told["why"], told["interrupted"]) == ("process ended with code 1", False)
    assert stage.serve(), "its request is not blamed for what it never met"
    meter = stage.finish()
    assert (meter.preemptions, meter.samples_lost) == (0, 0)
    assert stage.ends() == ["failed"] * 4 + ["user"]


def test_a_request_that_breaks_three_nodes_is_poison(stage: Stage) -> None:
    stage.coordinator.call("submit", [REQUEST])
    for _ in range(3):
        assert stage.serve()
        stage.lose("process ended with code 139", interrupted=False)
    assert stage.serve() == []
    (item,) = stage.coordinator.call("collect", 0, 0.0)["items"]
    assert item["reason"].startswith("poison: 3 failures")
    meter = stage.finish()
    assert (meter.preemptions, meter.samples_lost) == (0, 1)
    assert stage.ends() == ["failed"] * 3 + ["user"]


def test_a_request_may_meet_any_number_of_preemptions(stage: Stage) -> None:
    stage.coordinator.call("submit", [REQUEST])
    for _ in range(5):
        assert stage.serve()
        assert stage.lose("preempted", interrupted=True)["interrupted"]
    assert stage.serve()
    meter = stage.finish()
    assert (meter.preemptions, meter.samples_lost) == (5, 0)
    assert stage.ends() == ["interrupted"] * 5 + ["user"]
