"""Figures from a journal, on journals small enough to check by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotlight.observe.meter import RunMeter


def on(now: float, event: dict[str, Any], *commands: dict[str, Any]) -> dict[str, Any]:
    return {"type": "on", "now": now, "event": event, "commands": list(commands)}


def join(now: float, worker: str, role: str = "spot") -> list[dict[str, Any]]:
    node = worker.split("/")[0]
    return [
        on(now, {"type": "Join", "worker": worker, "node": node, "role": role}),
        on(now, {"type": "Admit"}, {"type": "Admitted", "worker": worker, "version": 0}),
    ]


def grant(now: float, worker: str, token: int, request: str) -> dict[str, Any]:
    kind, sample = request.split("/", 1)
    command = {"type": "Grant", "worker": worker, "token": token, "request": {"kind": kind, "sample": sample}}
    return on(now, {"type": "Pull"}, command)


def accepted(now: float, token: int, request: str) -> dict[str, Any]:
    return on(now, {"type": "Commit"}, {"type": "Accepted", "token": token, "request": request})


def train(now: float, state: str, iteration: int = 0) -> dict[str, Any]:
    return {"type": "phase", "phase": "train", "iteration": iteration, "state": state, "now": now}


def fed(tmp_path: Path, records: list[dict[str, Any]]) -> RunMeter:
    meter = RunMeter(tmp_path)
    for record in records:
        meter.feed(record)
    return meter


def test_busy_share_is_the_union_of_leases_over_the_time_available(tmp_path: Path) -> None:
    meter = fed(
        tmp_path,
        [
            *join(0, "s0/0"),
            *join(0, "od0/0", "on_demand"),
            train(10, "begin"),
            grant(11, "s0/0", 1, "draft/it1/row0/s0"),
            grant(12, "s0/0", 2, "draft/it1/row0/s1"),
            accepted(14, 1, "draft/it1/row0/s0"),
            accepted(16, 2, "draft/it1/row0/s1"),
            train(20, "end"),
        ],
    )
    assert meter.spot_busy_share == pytest.approx(5 / 10)
    assert (meter.drafts, meter.drafts_in_training) == (2, 2)


def test_a_node_counts_as_available_from_its_weights_to_its_loss(tmp_path: Path) -> None:
    lost = on(
        15,
        {"type": "NodeLost", "node": "s0", "reason": "preempted"},
        {"type": "Revoked", "token": 1, "worker": "s0/0", "request": "draft/it1/row0/s0", "reason": "lost"},
        {"type": "LostWorker", "worker": "s0/0", "epoch": 0, "reason": "preempted"},
        {"type": "LostNode", "node": "s0", "reason": "preempted"},
    )
    meter = fed(
        tmp_path,
        [
            train(10, "begin"),
            *join(12, "s0/0"),
            grant(13, "s0/0", 1, "draft/it1/row0/s0"),
            lost,
            train(20, "end"),
        ],
    )
    assert meter.spot_busy_share == pytest.approx(2 / 3)
    assert meter.preemptions == 1
    assert meter.drafts == 0


def test_a_draft_begun_before_training_is_not_one_of_the_training(tmp_path: Path) -> None:
    meter = fed(
        tmp_path,
        [
            *join(0, "s0/0"),
            grant(9, "s0/0", 1, "draft/it1/row0/s0"),
            train(10, "begin"),
            accepted(11, 1, "draft/it1/row0/s0"),
            train(20, "end"),
        ],
    )
    assert (meter.drafts, meter.drafts_in_training) == (1, 0)


def test_moved_and_lost_samples_and_given_back_nodes(tmp_path: Path) -> None:
    final = "final/it0/row0/s0"
    meter = fed(
        tmp_path,
        [
            *join(0, "s0/0"),
            *join(0, "s1/0"),
            grant(1, "s0/0", 1, final),
            on(2, {"type": "Release"}, {"type": "Revoked", "token": 1, "worker": "s0/0", "request": final}),
            grant(3, "s1/0", 2, final),
            on(4, {"type": "Fail"}, {"type": "Cancelled", "request": final, "reason": "poison"}),
            on(5, {"type": "NodeLost", "node": "s0", "reason": "released", "preempted": False},
               {"type": "LostNode", "node": "s0", "reason": "released"}),
        ],
    )  # fmt: skip
    assert (meter.samples_moved, meter.samples_lost, meter.preemptions) == (1, 1, 0)


def test_a_loss_seen_by_two_counts_once_and_a_second_life_again(tmp_path: Path) -> None:
    gone = {"type": "LostNode", "node": "s0", "reason": "silent"}
    twice = [on(1, {"type": "Tick"}, gone), on(2, {"type": "NodeLost", "node": "s0", "reason": "preempted"})]
    meter = fed(tmp_path, [*join(0, "s0/0"), *twice, *join(3, "s0/0"), *twice])
    assert meter.preemptions == 2


def test_catching_up_reads_every_record_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    lines = [json.dumps(record) for record in [*join(0, "s0/0"), train(1, "begin"), train(2, "end")]]
    path = tmp_path / "000001.jsonl"
    path.write_text(lines[0] + "\n" + lines[1] + "\n" + lines[2][:10])
    meter = RunMeter(tmp_path)
    meter.catch_up()
    meter.catch_up()
    assert meter.windows == []
    path.write_text("\n".join(lines) + "\n")
    meter.catch_up()
    (window,) = meter.windows
    assert (window.wall_s, window.available_s, window.busy_s) == (1.0, 1.0, 0.0)
