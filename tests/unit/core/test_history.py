"""The checkers see what is wrong with a journal that a faulty scheduler would have written."""

from __future__ import annotations

import copy

import pytest
from fakes.fake_drafts import FakeDrafts
from fakes.scheduler_world import STEPS, world

from spotlight.core import events as ev
from spotlight.core.history import check
from spotlight.core.history_nodes import NodeHistory
from spotlight.core.replay import replay
from spotlight.core.verdict import MAX_OFFENCES


def good_run():
    """A run with a loss, a resumed state, drafts, a publish and a stop."""
    w = world("a", "b", drafts=FakeDrafts(4))
    w.submit(3)
    first, second = w.pull("a", 2)
    w.save(first, 2)
    w.commit(second)
    w.say(ev.NodeLost("node-a", "preempted"))
    for _ in range(2):
        for grant in w.pull("b"):
            w.commit(grant)
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    w.commit(w.pull("b")[0])
    w.say(ev.CloseDrafts())
    w.publish()
    w.admit("b")
    w.say(ev.Stop("over"))
    return w.records


def places(records, name):
    """Every command of that type: (record, index)."""
    return [(r, i) for r in records[1:] for i, c in enumerate(r["commands"]) if c["type"] == name]


def verdicts(records):
    return {verdict.name.split()[0]: verdict for verdict in check(records)}


def test_a_good_run_is_clean_and_says_on_what():
    records = good_run()
    found = verdicts(records)
    assert all(verdict.ok for verdict in found.values()), found
    assert found["INV-2"].checked == "4 commits"
    assert str(found["INV-2"]) == "INV-2 one commit: kept, 4 commits"
    assert replay(records).ok


def no_fate(records):
    record, index = places(records, "Accepted")[1]
    del record["commands"][index]


def second_fate(records):
    record, index = places(records, "Accepted")[0]
    records[-1]["commands"].append(
        {"type": "Cancelled", "request": record["commands"][index]["request"], "reason": "x"}
    )


def no_reason(records):
    w = {"type": "Cancelled", "request": "final/it1/row1/s99", "reason": ""}
    records[-1]["commands"].append(w)


def granted_after_its_end(records):
    record, index = places(records, "Grant")[0]
    records[-2]["commands"].append(
        {**record["commands"][index], "token": 999, "worker": "b", "epoch": 2, "version": 1}
    )


def committed_twice(records):
    record, _ = places(records, "Accepted")[0]
    again = copy.deepcopy(record)
    again["seq"] = 1000
    records.append(again)


def commit_of_a_revoked_token(records):
    record, _ = places(records, "Revoked")[0]
    token = next(c["token"] for c in record["commands"] if c["type"] == "Revoked")
    commit, index = places(records, "Accepted")[1]
    commit["commands"][index]["token"] = token


def commit_of_an_unknown_token(records):
    commit, index = places(records, "Accepted")[1]
    commit["commands"][index]["token"] = 12345


def state_of_a_revoked_token(records):
    record, _ = places(records, "Revoked")[0]
    token = next(c["token"] for c in record["commands"] if c["type"] == "Revoked")
    late = {"type": "Progressed", "token": token, "request": "final/it1/row1/s0", "step": 3, "saved": True}
    records[-2]["commands"].append(late)


def token_falls(records):
    record, index = places(records, "Grant")[-1]
    record["commands"][index]["token"] = 1


def epoch_falls(records):
    record, index = places(records, "Joined")[1]
    record["commands"][index]["epoch"] = 1


def granted_to_a_lost_worker(records):
    record, index = places(records, "Grant")[-2]
    record["commands"][index] |= {"worker": "a", "epoch": 1}


def other_request_granted(records):
    record, index = places(records, "Grant")[0]
    record["commands"][index]["request"] = {**record["commands"][index]["request"], "batch_key": "other"}


def never_asked_for(records):
    record, index = places(records, "Grant")[0]
    record["commands"][index]["request"] = {**record["commands"][index]["request"], "sample": "it1/row1/s77"}


def resumed_from_nowhere(records):
    for record, index in places(records, "Grant"):
        if record["commands"][index].get("resume_step"):
            record["commands"][index]["resume_step"] = 3


def other_sample_made(records):
    record, _ = places(records, "Accepted")[0]
    record["event"]["outcome"]["sample"] = "it1/row1/s77"


def stale_final(records):
    early = {"type": "Published", "version": 1}
    records[5]["commands"].append(early)
    records[5]["event"] |= {"digest": "d1", "num_tensors": 3}


def torn_weights(records):
    record, _ = places(records, "Admitted")[0]
    record["event"]["num_tensors"] = 2


def not_admitted(records):
    record, index = places(records, "Admitted")[1]
    del record["commands"][index]


def version_falls(records):
    record, _ = places(records, "Admitted")[-1]
    record["commands"].append({"type": "Admitted", "worker": "b", "version": 0})
    record["event"] |= {"digest": "d0"}


@pytest.mark.parametrize(
    ("spoil", "invariant"),
    [
        (no_fate, "INV-1"), (second_fate, "INV-1"), (no_reason, "INV-1"), (granted_after_its_end, "INV-1"),
        (committed_twice, "INV-2"),
        (commit_of_a_revoked_token, "INV-3"), (commit_of_an_unknown_token, "INV-3"),
        (state_of_a_revoked_token, "INV-3"), (token_falls, "INV-3"), (epoch_falls, "INV-3"),
        (granted_to_a_lost_worker, "INV-3"),
        (other_request_granted, "INV-4"), (never_asked_for, "INV-4"), (resumed_from_nowhere, "INV-4"),
        (other_sample_made, "INV-4"),
        (stale_final, "INV-5"), (torn_weights, "INV-5"), (not_admitted, "INV-5"), (version_falls, "INV-5"),
    ],
)  # fmt: skip
def test_what_is_broken_is_found(spoil, invariant):
    records = good_run()
    spoil(records)
    verdict = verdicts(records)[invariant]
    assert not verdict.ok
    assert verdict.problems
    assert "BROKEN" in str(verdict)
    assert all(problem.seq > 0 for problem in verdict.problems)


def test_a_journal_that_ends_in_the_middle_is_no_offence():
    records = good_run()
    for length in range(1, len(records)):
        assert all(verdict.ok for verdict in check(records[:length])), length


def test_many_offences_are_counted_and_some_are_kept():
    records = good_run()
    records += [copy.deepcopy(places(records, "Accepted")[0][0]) for _ in range(50)]
    verdict = verdicts(records)["INV-2"]
    assert verdict.checked.startswith("50 offences")
    assert len(verdict.problems) == MAX_OFFENCES


def test_a_second_run_that_differs_in_bytes_is_noted():
    w = world("a", "b")
    w.submit(1)
    (slow,) = w.pull("a")
    w.pass_time(4.0, "b")
    w.commit(w.pull("b")[0], digest="x")
    w.commit(slow, digest="y")
    verdict = verdicts(w.records)["INV-4"]
    assert verdict.ok
    assert "1 second runs differ in bytes" in verdict.checked


def test_a_new_coordinator_begins_anew():
    first, second = good_run(), good_run()
    for record in second:
        record["seq"] += 1000
    assert all(verdict.ok for verdict in check([*first, *second]))
    assert replay([*first, *second]).ok


# ---------------------------------------------------------------------------- replay


def test_replay_sees_another_decision():
    records = good_run()
    record, index = places(records, "Grant")[0]
    record["commands"][index]["token"] = 7
    verdict = replay(records)
    assert not verdict.ok
    assert verdict.problems[0].seq == record["seq"]


def test_replay_after_lost_records_says_that_it_cannot_tell():
    records = good_run()
    records.insert(5, {"type": "gap", "seq": 5, "utc": 0.0, "lost": 3, "reason": "No space left on device"})
    assert "not applicable: 3 records" in replay(records).checked


# ---------------------------------------------------------------------------- machines and money


def node(kind, at_s, seq, launch=0, **fields):
    return {
        "type": "node",
        "kind": kind,
        "node": "s0",
        "launch": launch,
        "at_s": at_s,
        "seq": seq,
        "utc": at_s,
    } | fields


def requested(at_s, seq, launch=0):
    return node("requested", at_s, seq, launch, cloud="aws", instance_type="p5", gpus=8, price_class="spot")


def judge(*records, stopped=True):
    nodes = NodeHistory()
    for record in records:
        nodes.see(record)
    if stopped:
        nodes.see({"type": "on", "seq": 99, "utc": 900.0, "event": {"type": "Stop"}, "commands": []})
    return nodes.verdicts()


ENDED = {"reason": "user"}


def test_no_machines_means_nothing_to_judge():
    assert ["not applicable" in verdict.checked for verdict in judge()] == [True, True]


def test_a_failed_launch_and_one_that_worked_add_up():
    stops, adds = judge(
        requested(0.0, 1), node("ended", 30.0, 2, reason="launch_failed"),
        requested(40.0, 3, 1), node("up", 50.0, 4, 1), node("ready", 90.0, 5, 1), node("ended", 410.0, 6, 1, **ENDED),
    )  # fmt: skip
    assert stops.ok
    assert adds.ok
    assert adds.checked == "2 launches, 0.80 GPU-h"


def test_a_machine_that_outlives_its_run_is_an_offence_once_the_run_is_over():
    records = (requested(0.0, 1), node("up", 5.0, 2))
    assert not judge(*records)[0].ok
    assert judge(*records)[0].problems[0].seq == 2
    assert "1 of 1 machines live" in judge(*records, stopped=False)[0].checked


@pytest.mark.parametrize(
    "records",
    [
        (node("up", 5.0, 2), node("ended", 9.0, 3, **ENDED)),
        (requested(0.0, 1), node("up", 50.0, 2), node("ended", 9.0, 3, **ENDED)),
        (requested(0.0, 1), node("up", 5.0, 2), node("ended", 300.0, 3, **ENDED),
         requested(100.0, 4, 1), node("up", 110.0, 5, 1), node("ended", 400.0, 6, 1, **ENDED)),
    ],
    ids=["never requested", "ends before it begins", "two at one time"],
)  # fmt: skip
def test_lives_that_do_not_add_up_are_offences(records):
    assert not judge(*records)[1].ok
