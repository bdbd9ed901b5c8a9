"""Real processes on a real local Ray: killed, frozen, warned in time and in vain. The journal is clean after each."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import ray
from fakes.ray_explorer import Explorer, chain

from spotlight.core.history import trained_samples
from spotlight.core.types import SampleId
from spotlight.observe import journal
from spotlight.observe.verify import replay, verify
from spotlight.runtime.coordinator import start_coordinator

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

STEPS, REQUESTS = 8, 8
POLICY = {"dead_after_s": 1.5, "quiet_s": 0.5, "notice_margin_s": 0.5, "flap_backoff_s": 0.0}


@pytest.fixture(scope="module")
def cluster():
    tests = str(Path(__file__).parents[1])
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": tests}},
    )
    yield
    ray.shutdown()


class Run:
    """A coordinator with its workers, one iteration's requests, and what the journal says about them."""

    def __init__(self, folder):
        self.folder = folder
        self.journal = folder / "journal"
        self.coordinator = start_coordinator(self.journal, policy=POLICY, tick_s=0.05)
        self.explorers = {}
        self.call("publish", 0, "d0", 3)

    def call(self, method, *args):
        return ray.get(getattr(self.coordinator, method).remote(*args), timeout=60)

    def add(self, name, step_s=0.05, role="spot"):
        log = str(self.folder / f"{name}.steps")
        # Lost actors are lost: the session would start another, under another epoch.
        explorer = ray.remote(Explorer).options(num_cpus=0, max_concurrency=4, max_restarts=0).remote(
            self.coordinator, name, f"node-{name}", role, log, step_s, 2
        )  # fmt: skip
        ray.get(explorer.start.remote(), timeout=60)
        self.explorers[name] = explorer
        return ray.get(explorer.pid.remote(), timeout=60)

    def submit(self):
        self.call("submit", [
            {"kind": "final", "sample": f"it1/row1/s{seed}", "batch_key": "k", "num_steps": STEPS}
            for seed in range(REQUESTS)
        ])  # fmt: skip

    def records(self, name):
        """Every command of that type so far, as (when, command)."""
        return [
            (record["now"], command)
            for record in journal.read(self.journal)
            if record["type"] == "on"
            for command in record["commands"]
            if command["type"] == name
        ]

    def until(self, found, what, limit_s=90.0):
        deadline = time.monotonic() + limit_s
        while not (answer := found()):
            assert time.monotonic() < deadline, f"{what} did not happen; {self.call('snapshot')}"
            time.sleep(0.02)
        return answer

    def until_it_holds(self, worker, step):
        """Wait until the worker has saved that step of something."""

        def holds():
            leases = self.call("snapshot")["workers"].get(worker, {}).get("leases", {})
            return any(step <= at < STEPS - 1 for at in leases.values())

        self.until(holds, f"{worker} at step {step}")

    def collect(self):
        """All outcomes; every request must end committed."""
        items, since = [], 0
        deadline = time.monotonic() + 90.0
        while len(items) < REQUESTS:
            assert time.monotonic() < deadline, self.call("snapshot")
            reply = self.call("collect", since, 1.0)
            items += reply["items"]
            since = reply["next"]
        assert {item["fate"] for item in items} == {"committed"}
        return [item["outcome"] for item in items]

    def redone_steps(self):
        done = Counter()
        for path in self.folder.glob("*.steps"):
            done.update(tuple(line.split()[:2]) for line in path.read_text().splitlines())
        assert len(done) == REQUESTS * STEPS
        return sum(done.values()) - len(done)

    def finish(self):
        """Stop, and judge: each sample once, with the bytes of an undisturbed run, all invariants kept."""
        outcomes = self.collect()
        for outcome in outcomes:
            assert outcome["digest"] == chain(SampleId.parse(outcome["sample"]), STEPS)
        self.call("stop", "test over")
        assert trained_samples(journal.read(self.journal)) == {
            f"it1/row1/s{seed}": 1 for seed in range(REQUESTS)
        }
        for verdict in [*verify(self.journal), replay(self.journal)]:
            assert verdict.ok, (verdict, verdict.problems)
            assert "differ" not in verdict.checked
        return outcomes


@pytest.fixture
def run(cluster, tmp_path):
    made = Run(tmp_path)
    yield made
    for explorer in made.explorers.values():
        ray.kill(explorer)
    ray.kill(made.coordinator)


def detected(run, worker, since, what):
    """Wait for the loss; print how long it took."""
    at = run.until(
        lambda: [at for at, lost in run.records("LostWorker") if lost["worker"] == worker and at > since],
        "loss",
    )[0]
    print(f"\n{what}: noticed after {at - since:.2f} s (dead_after_s = {POLICY['dead_after_s']})")


def test_a_killed_worker_costs_at_most_a_step_of_each_request_it_held(run):
    victim = run.add("a", step_s=0.15)
    run.add("b")
    run.submit()
    run.until_it_holds("a", 2)
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    detected(run, "a", killed_at, "kill -9")
    outcomes = run.finish()
    assert any(outcome.get("resumed_from", 0) >= 2 for outcome in outcomes)
    assert run.redone_steps() <= 2  # a batch of two, one step each


def test_a_frozen_worker_is_replaced_and_the_zombie_is_refused(run):
    victim = run.add("a", step_s=0.15)
    run.add("b")
    run.submit()
    run.until_it_holds("a", 2)
    frozen_at = time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    try:
        detected(run, "a", frozen_at, "SIGSTOP")
        run.until(lambda: len(run.records("Accepted")) == REQUESTS, "all committed by the other")
    finally:
        os.kill(victim, signal.SIGCONT)
    run.until(lambda: run.records("Refused"), "a refusal of the zombie")
    run.until(lambda: len([j for _, j in run.records("Joined") if j["worker"] == "a"]) == 2, "its return")
    outcomes = run.finish()
    commits = ray.get(run.explorers["a"].commits.remote(), timeout=60)
    assert all(not accepted and reason.startswith("fenced") for _, accepted, reason in commits[-1:])
    assert {outcome["worker"] for outcome in outcomes} >= {"b"}


def test_after_a_notice_and_a_kill_nothing_is_done_twice(run):
    victim = run.add("a", step_s=0.15)
    run.add("b")
    run.submit()
    run.until_it_holds("a", 2)
    run.call("notice", "node-a", 0.5, "test")
    run.until(lambda: not run.call("snapshot")["workers"]["a"]["leases"], "everything handed back")
    os.kill(victim, signal.SIGKILL)
    outcomes = run.finish()
    assert any(outcome.get("resumed_from", 0) >= 2 for outcome in outcomes)
    assert run.redone_steps() == 0


def test_a_notice_without_a_kill_returns_the_node_to_service(run):
    run.add("a", step_s=0.1)
    run.submit()
    run.until_it_holds("a", 1)
    run.call("notice", "node-a", 0.3, "test")
    run.until(lambda: run.records("InService"), "the return")
    outcomes = run.finish()
    assert {outcome["worker"] for outcome in outcomes} == {"a"}
    assert run.redone_steps() == 0


def test_notices_that_repeat_and_come_late_change_nothing(run):
    victim = run.add("a", step_s=0.15)
    run.add("b")
    run.submit()
    run.until_it_holds("a", 2)
    for deadline_s in (0.5, 0.5, 120.0):
        run.call("notice", "node-a", deadline_s, "test")
    run.until(lambda: not run.call("snapshot")["workers"]["a"]["leases"], "everything handed back")
    os.kill(victim, signal.SIGKILL)
    run.call("node_lost", "node-a", "preempted", True)
    run.call("notice", "node-a", 0.0, "late")
    run.finish()
    assert len(run.records("Draining")) == 1
    assert run.redone_steps() == 0
