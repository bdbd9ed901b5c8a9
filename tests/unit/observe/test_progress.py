"""The story of a run folds into the same state for everyone who reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.observe import progress, words

STORY: list[dict[str, Any]] = [
    {"kind": "run_started", "at_s": 10.0, "run": "r", "recipe": "tiny", "iterations": 2},
    {
        "kind": "node",
        "at_s": 11.0,
        "node": "spot-0",
        "state": "ready",
        "role": "explorer",
        "price_class": "spot",
    },
    {"kind": "eval", "at_s": 12.0, "iteration": 0, "score": 0.5, "exact": 0.25},
    {"kind": "phase", "at_s": 13.0, "iteration": 1, "phase": "train"},
    {"kind": "node", "at_s": 14.0, "node": "spot-0", "state": "notice", "why": "30 s"},
    {"kind": "node", "at_s": 15.0, "node": "spot-0", "state": "lost", "why": "killed"},
    {"kind": "iteration", "at_s": 16.0, "iteration": 1, "reward_mean": 0.4, "wall_s": 6.0},
    {"kind": "grid", "at_s": 16.5, "iteration": 1, "path": "samples/it00001.png"},
    {"kind": "checkpoint", "at_s": 17.0, "iteration": 1, "path": "checkpoints/1"},
    {"kind": "warning", "at_s": 18.0, "text": "3 groups had no variance"},
    {"kind": "node", "at_s": 19.0, "node": "spot-0", "state": "back"},
    {"kind": "eval", "at_s": 20.0, "iteration": 1, "score": 0.75, "exact": 0.5},
    {
        "kind": "run_finished",
        "at_s": 21.0,
        "summary": {"score_base": 0.5, "score_final": 0.75, "wall_s": 11.0},
    },
]


def test_the_whole_story() -> None:
    state = progress.fold(STORY)
    assert (state.run, state.iterations_done, state.iterations, state.phase) == ("r", 2, 2, "")
    assert state.scores == [(0, 0.5), (1, 0.75)]
    assert state.rewards == [(1, 0.4)]
    assert state.numbers == {"iteration": 1, "reward_mean": 0.4, "wall_s": 6.0}
    assert (state.checkpoint, state.checkpoint_s, state.started_s, state.updated_s) == (1, 17.0, 10.0, 21.0)
    assert state.grids == [(1, "samples/it00001.png")]
    assert state.warnings == ["3 groups had no variance"]
    assert state.preemptions == 1
    assert state.nodes["spot-0"].state == "ended"
    node = progress.fold(STORY[:-1]).nodes["spot-0"]
    assert (node.state, node.role, node.price_class, node.since_s, node.gone) == (
        "back",
        "explorer",
        "spot",
        19.0,
        False,
    )
    assert state.ended


def test_a_node_that_broke_is_lost_but_no_preemption() -> None:
    broke = {"kind": "node", "node": "spot-1", "state": "lost", "why": "exit 1", "interrupted": False}
    state = progress.fold([*STORY, broke, {**broke, "interrupted": True}])
    assert state.preemptions == 2


def test_a_node_keeps_its_role_and_a_lost_one_stays_listed() -> None:
    node = progress.fold(STORY[:6]).nodes["spot-0"]
    assert (node.role, node.state, node.why, node.gone) == ("explorer", "lost", "killed", True)


def test_a_resumed_run_keeps_its_past_and_forgets_its_nodes() -> None:
    failed = [*STORY[:7], {"kind": "run_failed", "at_s": 17.0, "code": "lock", "message": "m", "hint": None}]
    again = {"kind": "run_started", "at_s": 100.0, "run": "r", "iterations": 4}
    state = progress.fold([*failed, again])
    assert not state.ended
    assert state.nodes == {}
    assert (state.scores, state.preemptions, state.started_s, state.iterations) == ([(0, 0.5)], 1, 10.0, 4)


def test_iterations_done_again_after_a_resume_count_once() -> None:
    numbers = [
        {"kind": "iteration", "iteration": i, "reward_mean": r} for i, r in ((0, 0.1), (1, 0.2), (2, 0.3))
    ]
    scores = [{"kind": "eval", "iteration": i, "score": r} for i, r in ((0, 0.5), (2, 0.6))]
    again = [{"kind": "run_started", "run": "r"}, {"kind": "iteration", "iteration": 1, "reward_mean": 0.25}]
    state = progress.fold([*numbers, *scores, *again, {"kind": "eval", "iteration": 2, "score": 0.7}])
    assert state.rewards == [(0, 0.1), (1, 0.25)]
    assert state.scores == [(0, 0.5), (2, 0.7)]
    assert state.iterations_done == 2


VALUE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
)


@given(st.lists(st.dictionaries(
    st.sampled_from(["kind", "at_s", "node", "state", "why", "iteration", "iterations", "score", "summary",
                     "phase", "path", "reward_mean", "wall_s", "text", "spot_busy_share", "exact"]),
    st.sampled_from(progress.KINDS) | VALUE,
)))  # fmt: skip
def test_no_event_however_odd_raises(events: list[dict[str, Any]]) -> None:
    progress.fold(events)
    for event in events:
        text = words.describe(event)
        assert text is None or "\n" not in text


def test_the_log_stamps_scrubs_keeps_and_hands_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-5511")
    heard: list[dict[str, Any]] = []
    log = progress.ProgressLog(tmp_path, heard.append, clock=lambda: 42.0)
    log({"kind": "warning", "text": "no login with canary-5511"})
    log({"kind": "warning", "text": "later", "at_s": 43.0})
    log({"kind": "gossip", "text": "not for the story"})
    log.close()
    kept = list(progress.events(tmp_path))
    assert kept == heard[:2]
    assert kept[0] == {"at_s": 42.0, "kind": "warning", "text": "no login with [redacted]"}
    assert kept[1]["at_s"] == 43.0


def test_a_run_without_a_story_has_no_events(tmp_path: Path) -> None:
    assert list(progress.events(tmp_path)) == []
    assert progress.fold([]).updated_s is None


def test_every_kind_is_folded_and_only_the_phase_goes_without_words() -> None:
    assert set(progress._HANDLERS) == set(progress.KINDS)
    assert {kind for kind in progress.KINDS if words.describe({"kind": kind}) is None} == {"phase"}


@pytest.mark.parametrize("kind", progress.KINDS)
@pytest.mark.parametrize(
    "value", [None, "x", [1], {"a": 1}, True, float("nan"), float("inf"), 10**400], ids=range(8)
)
def test_each_kind_with_each_odd_value(kind: str, value: Any) -> None:
    fields = (
        "run",
        "iterations",
        "iteration",
        "node",
        "state",
        "why",
        "score",
        "exact",
        "reward_mean",
        "summary",
        "at_s",
    )
    event = {"kind": kind, **dict.fromkeys(fields, value)}
    progress.fold([event])
    words.describe(event)
    words.clock(value)
