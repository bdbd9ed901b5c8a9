"""Loss, notices, poison and flapping: what the scheduler does when machines go."""

from __future__ import annotations

import pytest
from fakes.scheduler_world import assert_clean, of, teach, world

from spotlight.core import events as ev
from spotlight.core.types import Gpu, Policy


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
