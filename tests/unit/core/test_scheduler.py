"""What the scheduler promises, case by case; the state machine in tests/property mixes all of it."""

from __future__ import annotations

import re

import pytest
from fakes.fake_drafts import FakeDrafts
from fakes.scheduler_world import STEPS, of, world

from spotlight.core import events as ev
from spotlight.core import scheduler as scheduler_module
from spotlight.core.history import check, trained_samples
from spotlight.core.replay import replay
from spotlight.core.scheduler import Scheduler
from spotlight.core.types import Gpu, Policy


def assert_clean(w):
    for verdict in [*check(w.records), replay(w.records)]:
        assert verdict.ok, (verdict, verdict.problems)


def by_name(w):
    return {verdict.name: verdict for verdict in check(w.records)}


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


def teach(w, cost_s):
    """Let each worker do one request at a known cost."""
    for number, (worker, seconds) in enumerate(cost_s.items()):
        w.submit(1, iteration=1, first=1000 + number)
        w.commit(w.pull(worker)[0], cost_s=seconds)


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


# ---------------------------------------------------------------------------- loss, notices, poison


def test_a_silent_worker_is_lost_and_its_state_goes_on_elsewhere():
    w = world("a", "b", policy=Policy(dead_after_s=3.0))
    w.submit(1)
    (held,) = w.pull("a")
    w.save(held, 3)
    commands = w.pass_time(3.5, "b")
    assert [c.worker for c in of(commands, ev.LostWorker)] == ["a"]
    (on,) = w.pull("b")
    assert (on.request, on.resume_step) == (held.request, 3)


def test_a_pause_of_the_coordinator_is_not_the_workers_death():
    w = world("a")
    w.now += 60.0
    assert w.say(ev.Tick(60.0)) == [ev.Paused(60.0)]
    assert not of(w.pass_time(2.5), ev.LostWorker)
    assert of(w.pass_time(0.5), ev.LostWorker)


def test_a_hung_gpu_that_still_beats_is_lost():
    w = world("a", policy=Policy(stall_after_s=20.0))
    w.submit(1)
    (held,) = w.pull("a")
    w.pass_time(15.0, "a")
    w.save(held, 1)
    assert not of(w.pass_time(19.0, "a"), ev.LostWorker)
    assert [c.reason for c in of(w.pass_time(2.0, "a"), ev.LostWorker)] == ["no denoising step"]
    assert_clean(w)


def test_a_grant_whose_reply_got_lost_is_given_to_another():
    w = world("a", "b")
    w.submit(1)
    (lost,) = w.pull("a")
    assert not w.pull("b")
    assert not of(w.say(ev.Heartbeat("a", w.epoch["a"])), ev.Revoked), "it may be on its way"
    w.now += 3.5
    w.beat("b")
    commands = w.say(ev.Heartbeat("a", w.epoch["a"]))
    assert of(commands, ev.Revoked)[0].token == lost.token
    assert of(commands, ev.Grant)[0].worker == "b"


def test_a_notice_stops_a_batch_at_one_step_and_nothing_is_lost():
    w = world("a", "b")
    w.submit(4)
    first, second = w.pull("a", 2)
    w.beat("a", first, step=2)
    w.beat("a", second, step=1)
    commands = w.say(ev.Notice("node-a", 30.0, "imds"))
    assert {(c.token, c.step) for c in of(commands, ev.StopAt)} == {(first.token, 3), (second.token, 3)}
    assert dict(w.beat("a", first, second, step=2).stop_at) == {first.token: 3, second.token: 3}
    assert not w.pull("a"), "no new work after a notice"
    for grant in (first, second):
        assert of(w.save(grant, 3), ev.Progressed)[0].stop_at == 3
        w.say(ev.Release(grant.token))
    w.say(ev.NodeLost("node-a", "preempted"))
    w.pull("b", 2), w.pull("b", 2)
    resumed = w.scheduler.leases.values()
    assert sorted(lease.step for lease in resumed) == [0, 0, 3, 3]
    assert_clean(w)


def test_what_ends_well_before_the_deadline_may_finish():
    w = world("a", policy=Policy(notice_margin_s=5.0))
    teach(w, {"a": 4.0})
    w.submit(1)
    (held,) = w.pull("a")
    assert not of(w.say(ev.Notice("node-a", 120.0, "imds")), ev.StopAt)
    assert of(w.say(ev.Notice("node-a", 8.0, "imds")), ev.StopAt), "the notice has become shorter"
    assert of(w.commit(held), ev.Accepted)


def test_notices_twice_late_and_for_nobody_change_nothing():
    w = world("a")
    assert of(w.say(ev.Notice("node-a", 30.0, "imds")), ev.Draining)
    for event in (
        ev.Notice("node-a", 30.0, "imds"),
        ev.Notice("node-a", 60.0, "sigterm"),
        ev.Notice("x", 1.0, ""),
    ):
        assert [type(c) for c in w.say(event)] == [ev.Ignored]
    w.say(ev.NodeLost("node-a", "preempted"))
    assert [type(c) for c in w.say(ev.Notice("node-a", 30.0, "imds"))] == [ev.Ignored]
    w.join("a")
    w.submit(1)
    assert w.pull("a"), "the node's next life has no notice"


@pytest.mark.parametrize("deadline_s", [120.0, 30.0, 0.0, -5.0])
def test_a_false_alarm_ends_after_a_quiet_period(deadline_s):
    w = world("a", policy=Policy(quiet_s=10.0))
    w.submit(1)
    w.say(ev.Notice("node-a", deadline_s, "rebalance"))
    assert not w.pull("a")
    assert not of(w.pass_time(max(deadline_s, 0.0) + 9.0, "a"), ev.Grant)
    commands = w.pass_time(2.0, "a")
    assert of(commands, ev.InService)
    assert of(commands, ev.Grant)


def test_a_withdrawn_notice_ends_at_once():
    w = world("a", "b")
    w.submit(2)
    (held,) = w.pull("a")
    w.say(ev.Notice("node-a", 30.0, "imds"))
    assert not w.pull("a")
    assert [grant.worker for grant in of(w.say(ev.WithdrawNotice("node-a")), ev.Grant)] == ["a"]
    assert not w.beat("a", held).stop_at
    assert [type(c) for c in w.say(ev.WithdrawNotice("node-a"))] == [ev.Ignored]


def test_a_request_that_kills_three_workers_is_poison_and_its_neighbours_live():
    w = world("a", policy=Policy(flap_backoff_s=0.0))  # flapping is another matter
    w.submit(3)
    poison = "final/it1/row1/s1"
    for _ in range(20):
        grants = w.pull("a", 3)
        if not grants:
            break
        if poison in [grant.request.id for grant in grants]:
            w.say(ev.WorkerLost("a", w.epoch["a"], "exit 139"))
            w.join("a")
            w.pass_time(1.0, "a")
        else:
            for grant in grants:
                w.commit(grant)
    fates = {record.id: record.fate for record in w.scheduler.records.values()}
    assert fates.pop(poison).startswith("poison: 3 failures")
    assert all(isinstance(fate, int) for fate in fates.values())
    assert_clean(w)


def test_preemptions_are_nobodys_fault():
    w = world("a", policy=Policy(flap_backoff_s=0.0))
    w.submit(1)
    for number in range(8):
        assert w.pull("a")
        if number % 2:
            w.say(ev.Notice("node-a", 30.0, "imds"))
            w.say(ev.WorkerLost("a", w.epoch["a"], "killed"))
        else:
            w.say(ev.NodeLost("node-a", "preempted"))
        w.join("a")
        w.pass_time(0.5, "a")


def test_three_failures_on_live_workers_are_poison_too():
    w = world("a")
    w.submit(1)
    for _ in range(3):
        (held,) = w.pull("a")
        w.save(held, 2)
        commands = w.say(ev.Fail(held.token, "reward raised"))
        assert of(commands, ev.StateDropped), "what failed from a state begins anew"
    assert of(commands, ev.Cancelled)[0].reason == "poison: 3 failures, the last: failed: reward raised"


def test_a_flapping_worker_waits_longer_each_time():
    w = world(policy=Policy(flap_backoff_s=2.0, flap_backoff_max_s=5.0, flap_life_s=60.0))
    waits = []
    for _ in range(6):
        waits.append(of(w.join("a"), ev.Joined)[0].cooling_s)
        w.now += 1.0
        w.say(ev.NodeLost("node-a", "preempted"))
    assert waits == [0.0, 0.0, 2.0, 4.0, 5.0, 5.0]
    w.join("a")
    w.submit(1)
    assert not w.pull("a")
    commands = w.pass_time(5.5, "a")
    assert of(commands, ev.InService)
    assert of(commands, ev.Grant)
    w.pass_time(60.0, "a")  # a long life forgives
    w.say(ev.NodeLost("node-a", "preempted"))
    assert of(w.join("a"), ev.Joined)[0].cooling_s == 0.0


def test_the_loss_of_one_node_breaks_every_group_that_stands_on_it():
    w = world("b")
    w.say(ev.Join("wide", "n0", "spot", (Gpu("n0", 0), Gpu("n1", 0))))
    w.admit("wide")
    w.submit(1)
    (held,) = w.pull("wide")
    commands = w.say(ev.NodeLost("n1", "preempted"))
    assert [c.worker for c in of(commands, ev.LostWorker)] == ["wide"]
    assert w.pull("b")[0].request == held.request
    assert "n0" not in w.scheduler.members.nodes


def test_all_spot_gone_is_not_the_end():
    w = world("a", "b")
    w.join("head", role="on_demand")
    w.submit(2)
    w.pull("a"), w.pull("b")
    w.pull("head")
    commands = w.say(ev.NodeLost("node-a", "preempted")) + w.say(ev.NodeLost("node-b", "preempted"))
    assert [grant.worker for grant in of(commands, ev.Grant)] == ["head"]


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
