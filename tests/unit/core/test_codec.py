"""Messages survive the wire and the journal; nothing else passes for one."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.core import events as ev
from spotlight.core.types import Gpu, Outcome, Policy, Request, SampleId
from spotlight.errors import DataError

counts = st.integers(0, 10**17)
samples = st.builds(SampleId, counts, counts, counts)
st.register_type_strategy(SampleId, samples)
st.register_type_strategy(float, st.floats(0, 1e9))
st.register_type_strategy(int, st.integers(1, 2**53))
st.register_type_strategy(Request, st.builds(Request))
info = st.dictionaries(st.text(), st.none() | st.booleans() | st.text() | st.lists(st.integers(-9, 9)))
outcomes = st.builds(Outcome, reward=st.none() | st.floats(-9, 9), info=info)
st.register_type_strategy(Outcome, outcomes)
joins = st.builds(ev.Join, members=st.just(()))
policies = st.builds(
    Policy, max_deaths=st.integers(1, 9), dead_after_s=st.floats(0.1, 9), stall_after_s=st.just(2.0)
)
messages = st.one_of(
    joins,
    policies,
    outcomes,
    st.builds(Request),
    *[st.builds(cls) for cls in (*ev.EVENTS, *ev.COMMANDS) if cls is not ev.Join],
)


@given(messages)
@settings(max_examples=500)
def test_every_message_survives_json(message):
    assert ev.decode(json.loads(json.dumps(ev.encode(message), allow_nan=False))) == message


@given(samples)
def test_a_sample_id_reads_back(sample):
    assert SampleId.parse(str(sample)) == sample


@pytest.mark.parametrize(
    "text",
    [
        "",
        "it1/row2",
        "it1/row2/s3\n",
        "it01/row2/s3",
        "it-1/row2/s3",
        "it1/row2/s3/x",
        "it١/row2/s3",
        "it1/row2/s" + "9" * 40,
    ],
)
def test_what_is_not_a_sample_id_is_refused(text):
    with pytest.raises(ValueError, match="not a sample id"):
        SampleId.parse(text)


GOOD = ev.encode(ev.Commit(3, Outcome(SampleId(1, 2, 3), "final", 0, 0.5, "d", "w", 1.0, 4)))
BEAT = ev.encode(ev.Heartbeat("w", 1, ((1, 2),)))


def changed(message, path, value):
    out = json.loads(json.dumps(message))
    place = out
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return out


@pytest.mark.parametrize(
    "data",
    [
        None, [], "Commit", {}, {"type": "Nothing"}, {"type": ["Commit"]}, {"type": "__init__"},
        {"type": "Release"},
        changed(GOOD, ["token"], "3"), changed(GOOD, ["token"], True), changed(GOOD, ["token"], 2**63),
        changed(GOOD, ["more"], 1), changed(GOOD, ["outcome"], None), changed(GOOD, ["outcome", "more"], 1),
        changed(GOOD, ["outcome", "sample"], "it1/row2"), changed(GOOD, ["outcome", "kind"], "other"),
        changed(GOOD, ["outcome", "reward"], float("nan")), changed(GOOD, ["outcome", "reward"], "0.5"),
        changed(GOOD, ["outcome", "cost_s"], float("inf")), changed(GOOD, ["outcome", "cost_s"], -1),
        changed(GOOD, ["outcome", "num_steps"], -1), changed(GOOD, ["outcome", "info"], [1]),
        changed(GOOD, ["outcome", "info"], {"x": float("nan")}),
        changed(GOOD, ["outcome", "info"], {"x": {"y": {"z": [[[[[[[[1]]]]]]]]}}}),
        changed(BEAT, ["beats"], [[1]]), changed(BEAT, ["beats"], [[1, 2, 3]]), changed(BEAT, ["beats"], [1]),
        changed(BEAT, ["beats"], "12"), changed(BEAT, ["worker"], None),
        {"type": "Join", "worker": "w", "node": "n", "role": "boss"},
        {"type": "Join", "worker": "w", "node": "n", "role": "spot", "members": [{"node": "other"}]},
        {"type": "Policy", "dead_after_s": 0}, {"type": "Request", "kind": "final", "sample": "it1/row1/s1",
                                                "batch_key": "k", "num_steps": 0},
    ],
)  # fmt: skip
def test_what_is_not_a_message_is_refused(data):
    with pytest.raises(DataError):
        ev.decode(data)


def test_what_is_no_json_is_refused():
    cycle = {}
    cycle["self"] = cycle
    for value in (object(), cycle, {1: 2}, b"x"):
        with pytest.raises(DataError):
            ev.decode({"type": "Commit", "token": 1, "outcome": {**GOOD["outcome"], "info": {"x": value}}})


def test_only_messages_are_encoded():
    @dataclasses.dataclass
    class Commit:
        token: int

    for thing in (Commit(1), Gpu("n"), None, {}):
        with pytest.raises(DataError):
            ev.encode(thing)
