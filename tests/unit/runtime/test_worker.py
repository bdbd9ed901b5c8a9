"""A worker against a real coordinator, with a studio that only counts: what it hands in, when, what it drops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.direct_coordinator import DirectCoordinator

from spotlight.config import SamplerConfig
from spotlight.observe import journal
from spotlight.observe.verify import replay, verify
from spotlight.rl.denoise import DenoiseState, begin
from spotlight.rl.sampler import rollout_sampler
from spotlight.runtime import worker as module
from spotlight.runtime.studio import Picture, Shot
from spotlight.runtime.worker import Worker

STEPS = 4
SAMPLER = rollout_sampler(SamplerConfig(steps=STEPS))


class CountingStudio:
    """`at_step` is called with every step that was done, and one more when all are scored: let things happen there."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        self.at_step = at_step
        self.steps_done = 0

    def start(self, shots: Sequence[Shot]) -> list[DenoiseState]:
        return [
            self._begin(shot) if shot.state is None else DenoiseState.from_bytes(shot.state) for shot in shots
        ]

    def denoise(
        self, shots: Sequence[Shot], states: list[DenoiseState], on_step: Callable[[list[DenoiseState]], bool]
    ) -> list[DenoiseState]:
        while states[0].step < STEPS:
            states = [replace(state, step=state.step + 1) for state in states]
            self.steps_done += len(states)
            self.at_step(states[0].step)
            if not on_step(states):
                break
        return states

    def finish(self, shots: Sequence[Shot], states: Sequence[DenoiseState]) -> list[Picture]:
        self.at_step(STEPS + 1)
        return [Picture(state, 0.5, {}, {}) for state in states]

    def _begin(self, shot: Shot) -> DenoiseState:
        sample = shot.request.sample
        return begin(sample.row, sample.seed, version=shot.version, sampler=SAMPLER, run_seed=0, shape=(1, 2))


class Stage:
    """A coordinator with weights published, and a worker that has joined it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "get", lambda answer, timeout_s: answer)
        self.journal = folder / "journal"
        self.coordinator = DirectCoordinator(self.journal, {"flap_life_s": 0.0})
        self.coordinator.call("publish", 0, "d", 3)
        self.studio = CountingStudio()
        self.worker = Worker(
            name="s0/0",
            node="s0",
            role="spot",
            coordinator=self.coordinator,
            studio=self.studio,  # type: ignore[arg-type]
            artifacts=None,  # type: ignore[arg-type]
            admit=lambda version: ("d", 3),
            max_requests=4,
            renew_s=60.0,
        )
        self.worker.join()
        self.coordinator.calls.clear()

    def submit(self, count: int, first: int = 0) -> None:
        self.coordinator.call(
            "submit",
            [
                {"kind": "final", "sample": f"it1/row1/s{seed}", "batch_key": "k", "num_steps": STEPS}
                for seed in range(first, first + count)
            ],
        )

    def committed(self) -> list[str]:
        return [item["request"] for item in self.coordinator.call("collect", 0, 0.0)["items"]]

    def accepted_by_call(self) -> list[int]:
        """For every pull in the journal, how many commits were accepted since the one before."""
        counts, since = [], 0
        for record in journal.read(self.journal):
            if record["type"] != "on":
                continue
            since += sum(command["type"] == "Accepted" for command in record["commands"])
            if record["event"]["type"] == "Pull":
                counts.append(since)
                since = 0
        return counts

    def check(self) -> None:
        self.coordinator.call("stop", "test over")
        self.coordinator.close()
        for verdict in [*verify(self.journal), replay(self.journal)]:
            assert verdict.ok, (verdict, verdict.problems)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_results_travel_with_the_next_pull_one_call_a_batch(stage: Stage) -> None:
    stage.submit(10)
    pulls = iter(range(4))
    stage.worker.serve(lambda: next(pulls, None) is None)
    assert stage.accepted_by_call() == [0, 4, 4, 2]
    assert stage.coordinator.calls.count("pull") == 4
    assert "commit" not in stage.coordinator.calls
    stage.check()


def test_the_last_results_count_at_once_though_there_is_nothing_more_to_pull(stage: Stage) -> None:
    """A roll-out waits for its last final: the pull that brings it may wait, the final must not."""
    stage.submit(1)
    ending = threading.Event()
    thread = threading.Thread(target=stage.worker.serve, args=(ending.is_set,))
    thread.start()
    assert stage.coordinator.call("collect", 0, 30.0)["items"]
    ending.set()
    stage.worker.end_pull()
    thread.join(timeout=1.9)  # less than a long poll takes
    assert not thread.is_alive()
    stage.check()


def test_who_is_told_to_end_with_results_in_hand_hands_them_in(stage: Stage) -> None:
    stage.submit(3)
    pulls = iter(range(1))
    stage.worker.serve(lambda: next(pulls, None) is None)
    assert stage.coordinator.calls.count("pull") == 1
    assert len(stage.committed()) == 3
    stage.check()


def test_results_of_an_epoch_that_has_passed_are_refused_and_the_worker_begins_anew(stage: Stage) -> None:
    stage.submit(2)

    def lost(step: int) -> None:
        if step == STEPS + 1 and stage.studio.steps_done <= 2 * STEPS:
            stage.coordinator.call("node_lost", "s0", "silent", False)

    stage.studio.at_step = lost
    pulls = iter(range(4))
    stage.worker.serve(lambda: next(pulls, None) is None)
    refused = [
        command["reason"]
        for record in journal.read(stage.journal)
        if record["type"] == "on" and record["event"]["type"] == "Commit"
        for command in record["commands"]
        if command["type"] == "Refused"
    ]
    assert refused == ["fenced", "fenced"]
    assert sorted(stage.committed()) == ["final/it1/row1/s0", "final/it1/row1/s1"]
    stage.check()


def test_a_notice_stops_at_the_agreed_step_and_the_work_goes_on_elsewhere_from_there(stage: Stage) -> None:
    stage.submit(2)

    def announced(step: int) -> None:
        if step == 2:  # the coordinator knows of one: the next one is agreed on
            stage.coordinator.call("notice", "s0", 0.0, "test")
            stage.worker._renew()

    stage.studio.at_step = announced
    pulls = iter(range(1))
    stage.worker.serve(lambda: next(pulls, None) is None)
    assert stage.committed() == []
    epoch = stage.coordinator.call("register", "s1/0", "s1", "spot")["epoch"]
    stage.coordinator.call("admitted", "s1/0", epoch, 0, "d", 3)
    grants = stage.coordinator.call("pull", "s1/0", epoch, 4, 0.0)["grants"]
    deadline = time.monotonic() + 10
    while len(grants) < 2 and time.monotonic() < deadline:
        grants += stage.coordinator.call("pull", "s1/0", epoch, 4, 0.1)["grants"]
    assert [grant["resume_step"] for grant in grants] == [2, 2]
    assert all(DenoiseState.from_bytes(grant["state"]).step == 2 for grant in grants)
    assert stage.studio.steps_done == 2 * 2
    stage.check()


def test_a_state_that_cannot_be_read_is_given_up_and_begun_anew(stage: Stage) -> None:
    stage.submit(1)
    epoch = stage.coordinator.call("register", "s1/0", "s1", "spot")["epoch"]
    stage.coordinator.call("admitted", "s1/0", epoch, 0, "d", 3)
    (grant,) = stage.coordinator.call("pull", "s1/0", epoch, 1, 0.0)["grants"]
    stage.coordinator.call("save_state", grant["token"], 2, b"torn")
    stage.coordinator.call("worker_lost", "s1/0", epoch, "exit 1")
    pulls = iter(range(2))
    stage.worker.serve(lambda: next(pulls, None) is None)
    assert len(stage.committed()) == 1
    assert stage.studio.steps_done == STEPS
    stage.check()
