"""Useful, lost and idle time come from the scheduler: a real one is driven and its journal read."""

from __future__ import annotations

from collections import defaultdict

import pytest

from spotlight.core import billing, cost
from spotlight.core import events as ev
from spotlight.core.ledger import ledger_from_records
from spotlight.core.money import UNITS_PER_USD
from spotlight.core.scheduler import Scheduler
from spotlight.core.types import Gpu, Outcome, Policy, Request, SampleId
from spotlight.errors import DataError
from spotlight.provision.prices import load_rules

T0 = 1_772_000_000.0  # UTC of the coordinator's monotonic 0
HOUR_USD = "3600"  # a dollar a second: amounts are seconds


class Run:
    """A scheduler with its journal; `now` is the coordinator's monotonic clock."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(Policy(dead_after_s=1e6, stall_after_s=1e6))
        self.journal = [{"type": "start", "utc": T0}]
        self.now = 0.0
        self.on(ev.Publish(0, "d", 1))

    def on(self, event, wall_step_s=0.0):
        commands = self.scheduler.on(event, self.now)
        self.journal.append(
            {"type": "on", "utc": T0 + self.now + wall_step_s, "now": self.now, "event": ev.encode(event),
             "commands": [ev.encode(command) for command in commands]}
        )  # fmt: skip
        return commands

    def node(self, name, *, up=0.0, gpus=1, role="explorer", launch=0):
        key = {"node": name, "launch": launch}
        market = {"cloud": "aws", "instance_type": "x", "price_class": "spot"}
        records = [
            cost.NodeRequested(**key, **market, at_s=T0 + up, gpus=gpus, role=role),
            cost.NodeUp(**key, at_s=T0 + up),
            cost.NodeReady(**key, at_s=T0 + up),
            cost.PricePoint(**market, usd_per_h=cost.amount(HOUR_USD), source="test"),
        ]
        self.journal += [cost.encode(record) for record in records]

    def join(self, worker, node, members=()):
        epoch = next(
            c.epoch for c in self.on(ev.Join(worker, node, "spot", members)) if isinstance(c, ev.Joined)
        )
        self.on(ev.Admit(worker, epoch, 0, "d", 1))
        return epoch

    def pull(self, worker, epoch, max_requests=1):
        return [c for c in self.on(ev.Pull(worker, epoch, max_requests)) if isinstance(c, ev.Grant)]

    def commit(self, grant, **kwargs):
        request = grant.request
        outcome = Outcome(
            kind=request.kind, sample=request.sample, worker=grant.worker, version=0, reward=1.0,
            digest="d", cost_s=1.0, num_steps=4,
        )  # fmt: skip
        return self.on(ev.Commit(grant.token, outcome), **kwargs)

    def seconds(self, until=100.0):
        """Charged seconds by (node, phase) of machines that are still up at `until`."""
        out = defaultdict(int)
        ledger = ledger_from_records(self.journal)
        for charge in billing.bill(ledger, load_rules(), T0 + until).charges:
            out[charge.key, charge.phase] += charge.units
        return {
            (key.node, phase): round(units / UNITS_PER_USD, 6) for (key, phase), units in out.items() if units
        }


def finals(count):
    return tuple(Request("final", SampleId(0, row, 0), "b", 4) for row in range(count))


def test_time_from_grant_to_commit_is_useful_and_the_rest_idle():
    run = Run()
    run.node("n0")
    epoch = run.join("w", "n0")
    run.on(ev.Submit(finals(1)))
    run.now = 10.0
    (grant,) = run.pull("w", epoch)
    run.now = 40.0
    run.commit(grant)
    assert run.seconds() == {("n0", "useful"): 30.0, ("n0", "idle"): 70.0}


def test_a_batch_of_leases_is_one_busy_stretch():
    run = Run()
    run.node("n0")
    epoch = run.join("w", "n0")
    run.on(ev.Submit(finals(3)))
    run.now = 10.0
    grants = run.pull("w", epoch, 3)
    assert len(grants) == 3
    for grant, at in zip(grants, (40.0, 41.0, 45.0), strict=True):
        run.now = at
        run.commit(grant)
    assert run.seconds() == {("n0", "useful"): 35.0, ("n0", "idle"): 65.0}


def test_a_lost_lease_is_lost_work_from_its_last_saved_step_on():
    run = Run()
    run.node("n0")
    epoch = run.join("w", "n0")
    run.on(ev.Submit(finals(1)))
    run.now = 10.0
    (grant,) = run.pull("w", epoch)
    run.now = 25.0
    run.on(ev.Progress(grant.token, 2, "digest", 100))
    run.now = 40.0
    run.on(ev.NodeLost("n0", "gone"))
    assert run.seconds() == {("n0", "useful"): 15.0, ("n0", "lost"): 15.0, ("n0", "idle"): 70.0}


def test_a_lease_without_a_saved_step_is_lost_whole():
    run = Run()
    run.node("n0")
    epoch = run.join("w", "n0")
    run.on(ev.Submit(finals(1)))
    run.now = 10.0
    run.pull("w", epoch)
    run.now = 40.0
    run.on(ev.NodeLost("n0", "gone"))
    assert run.seconds() == {("n0", "lost"): 30.0, ("n0", "idle"): 70.0}


def test_a_group_over_two_nodes_is_busy_on_both_by_its_gpus():
    run = Run()
    run.node("n0", gpus=2)
    run.node("n1", gpus=4)
    epoch = run.join("w", "n0", (Gpu("n0", 0), Gpu("n0", 1), Gpu("n1", 0)))
    run.on(ev.Submit(finals(1)))
    (grant,) = run.pull("w", epoch)
    run.now = 40.0
    run.commit(grant)
    assert run.seconds() == {
        ("n0", "useful"): 40.0,
        ("n0", "idle"): 60.0,
        ("n1", "useful"): 10.0,
        ("n1", "idle"): 90.0,
    }


def test_a_step_of_the_wall_clock_moves_nothing():
    run = Run()
    run.node("n0")
    epoch = run.join("w", "n0")
    run.on(ev.Submit(finals(1)))
    run.now = 10.0
    (grant,) = run.pull("w", epoch)
    run.now = 40.0
    run.commit(grant, wall_step_s=-3600.0)
    assert run.seconds() == {("n0", "useful"): 30.0, ("n0", "idle"): 70.0}


def test_trainers_work_while_the_training_phase_lasts():
    run = Run()
    run.node("od", gpus=8, role="trainer")
    run.node("n0")
    for phase, begin, end in (("roll_out", 0.0, 20.0), ("train", 20.0, 50.0), ("publish", 50.0, 55.0)):
        for state, now in (("begin", begin), ("end", end)):
            run.journal.append({"type": "phase", "utc": T0 + now, "now": now, "phase": phase, "state": state})
    assert run.seconds() == {("od", "useful"): 35.0, ("od", "idle"): 65.0, ("n0", "idle"): 100.0}


def test_work_belongs_to_the_launch_that_did_it():
    run = Run()
    run.node("n0")
    run.now = 50.0
    run.node("n0", up=50.0, launch=1)
    epoch = run.join("w", "n0")
    run.on(ev.Submit(finals(1)))
    (grant,) = run.pull("w", epoch)
    run.now = 60.0
    run.commit(grant)
    ledger = ledger_from_records(run.journal)
    assert {key.launch for key in ledger.work} == {1}


@pytest.mark.parametrize(
    "record", [{"type": "gap", "lost": 3}, {"type": "worker"}, {"type": "eval", "score": 1}]
)
def test_other_records_pass_by(record):
    run = Run()
    run.journal.append(record)
    assert ledger_from_records(run.journal).work == {}


@pytest.mark.parametrize(
    "record",
    [
        {"type": "on"},
        {"type": "on", "utc": 1, "now": "x", "event": {}, "commands": [1]},
        {"type": "phase", "phase": "train"},
    ],
)
def test_a_damaged_record_is_named(record):
    with pytest.raises(DataError, match="journal record 7"):
        ledger_from_records([{**record, "seq": 7}])
