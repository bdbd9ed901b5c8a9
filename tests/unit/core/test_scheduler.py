"""What the scheduler promises, case by case; the state machine in tests/property mixes all of it."""

from __future__ import annotations

import re

import pytest
from fakes.fake_drafts import FakeDrafts
from fakes.scheduler_world import STEPS, assert_clean, of, teach, world

from spotlight.core import events as ev
from spotlight.core import scheduler as scheduler_module
from spotlight.core.history import trained_samples
from spotlight.core.scheduler import Scheduler
from spotlight.core.types import Policy

# ---------------------------------------------------------------------------- the invariants, by name


def test_every_invariant_of_the_docstring_has_its_test():
    named = set(re.findall(r"^INV-(\d)", scheduler_module.__doc__, re.M))
    tested = {match[1] for match in (re.match(r"test_inv_(\d)_", name) for name in globals()) if match}
    assert named == tested == set("12345")


def test_inv_1_one_fate():
    w = world("a", "b")
    w.submit(4)
    first, second = w.pull("a", 2)
    w.commit(first)
    w.say(ev.WorkerLost("a", w.epoch["a"], "exit 1"))
    again = w.pull("b", 4)
    assert second.request in [grant.request for grant in again]
    w.say(ev.Cancel("final", 1, "enough"))
    assert of(w.commit(again[0]), ev.Refused)
    w.say(ev.Stop("over"))
    ends = [
        c for record in w.records[1:] for c in record["commands"] if c["type"] in ("Accepted", "Cancelled")
    ]
    assert sorted(c["request"] for c in ends) == [f"final/it1/row1/s{seed}" for seed in range(4)]
    assert all(c.get("reason", "-") for c in ends)
    assert_clean(w)


def test_inv_2_one_commit():
    w = world("a", "b")
    w.submit(1)
    (slow,) = w.pull("a")
    w.pass_time(4.0, "b")  # a is silent and lost
    (fast,) = w.pull("b")
    assert fast.token > slow.token
    assert of(w.commit(fast), ev.Accepted)
    assert of(w.commit(slow), ev.Refused)
    # the answer got lost on the way: the winner asks again
    assert of(w.commit(fast), ev.Accepted) == [ev.Accepted(fast.token, fast.request.id, again=True)]
    assert trained_samples(w.records) == {"it1/row1/s0": 1}
    assert_clean(w)


def test_inv_3_fenced():
    w = world("a", "b")
    w.submit(2)
    (held,) = w.pull("a")
    zombie_epoch = w.epoch["a"]
    w.pass_time(4.0, "b")
    before = w.scheduler.snapshot()
    assert of(w.save(held, 3), ev.Refused)
    assert of(w.commit(held), ev.Refused)
    assert of(w.say(ev.Fail(held.token, "x")), ev.Refused)
    assert of(w.say(ev.Release(held.token)), ev.Refused)
    assert w.say(ev.Pull("a", zombie_epoch, 1)) == [ev.Wake("a", zombie_epoch, "fenced")]
    assert w.say(ev.Admit("a", zombie_epoch, 0, "d0", 3)) == [ev.Wake("a", zombie_epoch, "fenced")]
    renewed = of(w.say(ev.Heartbeat("a", zombie_epoch, ((held.token, 2),))), ev.Renewed)[0]
    assert renewed.fenced
    assert renewed.cancelled == (held.token,)
    assert w.scheduler.snapshot() == before
    # it comes back under a new epoch; its old self stays fenced
    w.join("a")
    assert w.epoch["a"] > zombie_epoch
    assert w.say(ev.Pull("a", zombie_epoch, 1)) == [ev.Wake("a", zombie_epoch, "fenced")]
    assert_clean(w)


def test_inv_4_same_samples():
    def run(faults):
        w = world("a", "b")
        w.submit(6)
        for grant in w.pull("a", 3):
            w.save(grant, 2)
        if faults:
            w.say(ev.NodeLost("node-a", "preempted"))
            w.join("a")
        for worker in ("b", "a", "b", "a", "b", "a", "b"):
            held = w.scheduler.members.workers[worker].leases or w.pull(worker, 6)
            for token in list(held) if isinstance(held, dict) else [grant.token for grant in held]:
                grant = next(
                    ev.decode(c) for r in w.records[1:] for c in r["commands"] if c.get("token") == token
                    and c["type"] == "Grant"
                )  # fmt: skip
                w.commit(grant)
        assert_clean(w)
        return trained_samples(w.records)

    assert run(faults=True) == run(faults=False) == {f"it1/row1/s{seed}": 1 for seed in range(6)}


def test_inv_5_bounded_staleness():
    w = world("a", drafts=FakeDrafts())
    w.submit(1)
    (held,) = w.pull("a")
    w.save(held, 3)
    w.publish()  # a still has version 0
    assert of(w.commit(held), ev.Refused)
    assert not w.pull("a"), "a final needs the current version"
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    parked = w.scheduler.leases
    assert [lease.request.kind for lease in parked.values()] == ["draft"], "a draft may be one version old"
    w.publish()
    assert not w.scheduler.leases, "but not two"
    assert not w.pull("a")
    (again,) = of(w.admit("a"), ev.Grant)
    assert again.request == held.request
    assert again.resume_step == 0, "the state of old weights is not gone on with"
    assert again.version == 2
    assert_clean(w)


# ---------------------------------------------------------------------------- who gets what


def test_a_worker_gets_nothing_before_it_has_admitted_weights():
    w = world()
    w.submit(1)
    w.join("late", admit=False)
    assert not w.pull("late")
    assert [grant.worker for grant in of(w.admit("late"), ev.Grant)] == ["late"]


@pytest.mark.parametrize(
    ("version", "digest", "num_tensors", "reason"),
    [(0, "torn", 3, "digest"), (0, "d0", 2, "2 of 3"), (7, "d7", 3, "not published"), (0, "d0", 0, "0 of 3")],
)
def test_weights_that_are_not_what_was_published_are_refused(version, digest, num_tensors, reason):
    w = world()
    w.submit(1)
    w.join("a", admit=False)
    answer = w.say(ev.Admit("a", w.epoch["a"], version, digest, num_tensors))
    assert reason in of(answer, ev.AdmissionRefused)[0].reason
    assert not w.pull("a")


def test_finals_before_evals_before_drafts():
    w = world("a", drafts=FakeDrafts())
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    w.submit(1, "eval")
    w.submit(1, "final")
    assert [w.pull("a")[0].request.kind for _ in range(3)] == ["final", "eval", "draft"]


def test_drafts_come_in_the_order_of_the_source_and_its_word_is_asked_live():
    drafts = FakeDrafts(num_drafts=3)
    w = world("a", "b", drafts=drafts)
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    assert [grant.request.sample.seed for grant in w.pull("a", 2)] == [0, 1]
    (third,) = w.pull("b", 2)
    assert not w.pull("a", 2)
    drafts.left = 1  # the result of the third makes a fourth worth while
    grants = of(w.commit(third), ev.Grant)
    assert [(grant.worker, grant.request.sample.seed) for grant in grants] == [("a", 3)]
    assert drafts.done == {(7, 2): 0.5}


def test_on_demand_workers_never_draft():
    w = world(drafts=FakeDrafts())
    w.join("head", role="on_demand")
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    assert not w.pull("head")


def test_closing_drafts_cancels_the_outstanding_ones_at_once():
    drafts = FakeDrafts()
    w = world("a", drafts=drafts)
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    grants = w.pull("a", 2)
    w.save(grants[0], 2)
    w.say(ev.Release(grants[0].token))  # waits with its state
    w.say(ev.CloseDrafts())
    assert w.beat("a", *grants).cancelled == tuple(grant.token for grant in grants)
    assert not drafts.out
    assert not w.pull("a")
    assert_clean(w)


def test_cancelled_drafts_are_not_offered_again():
    drafts = FakeDrafts()
    w = world("a", drafts=drafts)
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    w.pull("a", 2)
    w.say(ev.Cancel("draft", 2, "driver"))
    assert not w.pull("a")
    assert not drafts.out
    assert_clean(w)


def test_drafts_of_an_iteration_that_is_forgotten_are_closed():
    drafts = FakeDrafts()
    w = world("a", drafts=drafts, policy=Policy(keep_iterations=1))
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    (grant,) = w.pull("a")
    w.submit(1, iteration=4)
    commands = w.publish()
    assert of(commands, ev.Cancelled)[0].request == grant.request.id
    w.admit("a")
    (final,) = w.pull("a")
    w.commit(final)
    assert not w.pull("a")
    assert not drafts.out
    assert_clean(w)


def test_a_draft_without_state_goes_back_to_the_source_and_one_with_state_goes_on():
    drafts = FakeDrafts()
    w = world("a", "b", drafts=drafts)
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    begun, fresh = w.pull("a", 2)
    w.save(begun, 3)
    w.say(ev.NodeLost("node-a", "preempted"))
    assert drafts.returned == [(fresh.request.sample.row, fresh.request.sample.seed)]
    (on,) = w.pull("b", 5)
    assert (on.request, on.resume_step) == (begun.request, 3)


def test_a_batch_holds_one_key_and_one_step():
    w = world("a", "b")
    w.submit(2, key="small")
    w.submit(2, key="large", first=10)
    held = w.pull("a", 2)
    w.save(held[0], 2)
    w.say(ev.NodeLost("node-a", "preempted"))
    seen = []
    while grants := w.pull("b", 8):
        assert len({(grant.request.batch_key, grant.resume_step, grant.batch) for grant in grants}) == 1
        seen += grants
    assert len(seen) == 4


def test_the_longest_go_first():
    w = world("a", "b")
    w.submit(1)
    (begun,) = w.pull("a")
    w.save(begun, 3)
    w.submit(1, first=1)
    w.say(ev.NodeLost("node-a", "preempted"))
    assert [w.pull("b")[0].resume_step for _ in range(2)] == [0, 3]


def test_the_last_requests_are_shared_out():
    w = world("a", "b", "c", "d")
    w.submit(6)
    assert [len(w.pull(worker, 8)) for worker in "abcd"] == [2, 1, 1, 1]


def test_the_last_request_waits_for_a_fast_worker_that_ends_it_sooner():
    w = world("fast", "slow")
    for _ in range(12):
        teach(w, {"fast": 1.0, "slow": 10.0})
        for record in w.scheduler.records.values():
            assert record.fate is not None
        w.scheduler.records.clear()
    w.submit(2)
    (first,) = w.pull("fast")
    assert not w.pull("slow"), "fast has done both by the time that slow would have done one"
    w.now += 1.0
    w.commit(first)
    assert len(w.pull("fast")) == 1


def test_a_slow_worker_gets_the_last_request_when_the_fast_one_fails_to_come():
    w = world("fast", "slow")
    for _ in range(12):
        teach(w, {"fast": 1.0, "slow": 10.0})
        w.scheduler.records.clear()
    w.submit(2)
    w.pull("fast")
    assert not w.pull("slow")
    grants = of(w.pass_time(4.0, "fast", "slow"), ev.Grant)
    assert [grant.worker for grant in grants] == ["slow"]


def test_nobody_is_given_a_second_run_of_what_it_holds_itself():
    """A worker that lost the answer to its pull pulls again: the request must not count its death twice."""
    w = world("a", "b")
    teach(w, {"a": 1.0, "b": 1.0})
    w.submit(1)
    (held,) = w.pull("a")
    w.pass_time(12.0, "a", "b")  # long overdue
    assert not w.pull("a")
    assert not of(w.say(ev.Tick(0.1)), ev.Grant)
    (second,) = w.pull("b")
    assert (second.request, second.duplicate) == (held.request, True)
    assert_clean(w)


def test_a_straggler_is_run_twice_and_the_first_commit_wins():
    w = world("a", "b")
    teach(w, {"a": 1.0, "b": 1.0})
    w.submit(2)
    (slow,), (quick,) = w.pull("a"), w.pull("b")
    w.save(slow, 1)
    w.now += 1.0
    w.commit(quick)
    assert not w.pull("b"), "not late yet"
    (second,) = of(w.pass_time(6.0, "a", "b"), ev.Grant)
    assert (second.worker, second.request, second.resume_step, second.duplicate) == (
        "b",
        slow.request,
        1,
        True,
    )
    assert not of(w.pass_time(6.0, "a", "b"), ev.Grant), "no third"
    answers = w.commit(second)
    assert of(answers, ev.Accepted)
    assert of(answers, ev.Revoked)[0].token == slow.token
    assert w.beat("a", slow).cancelled == (slow.token,)
    assert of(w.commit(slow), ev.Refused)
    assert_clean(w)


def test_the_loss_of_one_of_two_runs_leaves_the_other():
    w = world("a", "b", "c")
    teach(w, {"a": 1.0, "b": 1.0, "c": 1.0})
    w.submit(1)
    (slow,) = w.pull("a")
    w.pull("b")
    assert of(w.pass_time(6.0, "a", "b", "c"), ev.Grant)
    assert len(w.scheduler.leases) == 2
    w.say(ev.NodeLost("node-b", "preempted"))
    assert list(w.scheduler.leases) == [slow.token]
    assert not w.scheduler.finals
    assert of(w.commit(slow), ev.Accepted)
    assert_clean(w)


# ---------------------------------------------------------------------------- phases and bounds


def test_a_publish_wakes_those_that_wait_and_takes_back_what_is_stale():
    w = world("a", "b")
    w.submit(1)
    (held,) = w.pull("a")
    w.pull("b")
    commands = w.publish()
    assert of(commands, ev.Wake) == [ev.Wake("b", w.epoch["b"], "new weights")]
    assert of(commands, ev.Revoked)[0].token == held.token
    assert [type(c) for c in w.publish(1)] == [ev.Ignored]
    assert [type(c) for c in w.publish(0)] == [ev.Ignored]


def test_stop_gives_everything_a_fate_and_sends_the_waiting_home():
    w = world("a", "b", drafts=FakeDrafts(0))
    w.submit(2)
    w.pull("a")
    w.say(ev.OpenDrafts(2, "draft", STEPS))
    w.pull("b"), w.pull("b")
    commands = w.say(ev.Stop("finished"))
    assert len(of(commands, ev.Cancelled)) == 2
    assert ev.Wake("b", w.epoch["b"], "stopped") in commands
    w.submit(1, first=9)
    assert w.say(ev.Pull("a", w.epoch["a"], 1)) == [ev.Wake("a", w.epoch["a"], "stopped")]
    assert_clean(w)


def test_memory_stays_bounded_and_old_iterations_are_turned_away():
    w = world("a", policy=Policy(keep_iterations=2))
    for iteration in range(1, 30):
        w.submit(8, iteration=iteration)
        while grants := w.pull("a", 8):
            for grant in grants:
                w.commit(grant)
        w.publish()
        w.admit("a")
        assert len(w.scheduler.records) <= 8 * 4
    assert [c.request for c in w.submit(1, iteration=3)] == ["final/it3/row1/s0"]
    assert not w.pull("a")
    assert_clean(w)


def test_a_known_request_is_not_taken_twice():
    w = world("a")
    w.submit(2)
    w.submit(2)
    assert len(w.pull("a", 8)) == 2
    w.submit(1, "draft")
    assert not w.pull("a", 8)


@pytest.mark.parametrize(
    "changes",
    [{"version": 1}, {"kind": "eval"}, {"worker": "b"}, {"sample": None}],
    ids=["version", "kind", "worker", "sample"],
)
def test_an_outcome_that_is_not_what_was_granted_is_refused_and_the_lease_stays(changes):
    w = world("a", "b")
    w.submit(2)
    held, other = w.pull("a", 1) + w.pull("b", 1)
    changes = {"sample": other.request.sample} if "sample" in changes else changes
    assert of(w.commit(held, **changes), ev.Refused)
    assert of(w.commit(held), ev.Accepted)


def test_an_unknown_event_is_a_bug_of_the_caller():
    with pytest.raises(KeyError):
        Scheduler().on("hello", 0.0)
