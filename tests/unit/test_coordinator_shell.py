"""The coordinator's wire, without Ray: long polls, fenced callers, values that cannot be, what is remembered."""

from __future__ import annotations

import asyncio

import pytest

from spotlight.errors import DataError
from spotlight.observe import journal
from spotlight.observe.verify import replay, verify
from spotlight.runtime.coordinator import Coordinator

PLANNER = {"policy": "uniform", "drafts_per_prompt": 4, "settings": [[4, 16, 32]]}


def final(seed, **changes):
    return {"kind": "final", "sample": f"it1/row1/s{seed}", "batch_key": "k", "num_steps": 4} | changes


def outcome(grant, **changes):
    request = grant["request"]
    return {
        "sample": request["sample"], "kind": request["kind"], "version": grant["version"], "reward": 0.5,
        "digest": "x", "worker": "w", "cost_s": 1.0, "num_steps": 4,
    } | changes  # fmt: skip


async def served(folder, **options):
    """A coordinator with version 0 and one worker "w" in service; returns both and the worker's epoch."""
    made = Coordinator(str(folder), **options)
    await made.publish(0, "d", 3)
    epoch = (await made.register("w", "n", "spot", {}))["epoch"]
    assert (await made.admitted("w", epoch, 0, "d", 3))["accepted"]
    return made, epoch


def check(folder):
    for verdict in [*verify(folder), replay(folder)]:
        assert verdict.ok, (verdict, verdict.problems)


def test_a_pull_waits_for_work_and_results_come_back_once(tmp_path):
    async def scene():
        made, epoch = await served(tmp_path)
        waiting = asyncio.create_task(made.pull("w", epoch, 2, 30.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await made.submit([final(0), final(1)])
        reply = await waiting
        assert [grant["request"]["sample"] for grant in reply["grants"]] == ["it1/row1/s0", "it1/row1/s1"]
        first, second = reply["grants"]
        assert (await made.commit(first["token"], outcome(first)))["accepted"]
        got = await made.collect(0, 1.0)
        assert [item["outcome"]["sample"] for item in got["items"]] == ["it1/row1/s0"]
        assert (await made.collect(0, 1.0))["items"] == got["items"], "asked again: the answer was lost"
        reply = await made.pull("w", epoch, 1, 0.0, [(second["token"], outcome(second))])
        assert reply["answers"] == [{"accepted": True, "reason": ""}]
        assert reply["grants"] == []
        assert [i["request"] for i in (await made.collect(1, 1.0))["items"]] == ["final/it1/row1/s1"]
        assert (await made.collect(2, 0.0)) == {"items": [], "next": 2, "drafts_complete": False}
        await made.stop()

    asyncio.run(scene())
    check(tmp_path)


def test_a_pull_that_ends_or_is_cancelled_gets_no_grant_behind_its_back(tmp_path):
    async def scene():
        made, epoch = await served(tmp_path)
        assert (await made.pull("w", epoch, 1, 0.01))["grants"] == []
        task = asyncio.create_task(made.pull("w", epoch, 1, 30.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await made.submit([final(0)])
        assert (await made.snapshot())["leased"] == 0
        older = asyncio.create_task(made.pull("w", epoch, 1, 30.0))
        assert len((await older)["grants"]) == 1
        older = asyncio.create_task(made.pull("w", epoch, 1, 30.0))
        await asyncio.sleep(0)
        newer = asyncio.create_task(made.pull("w", epoch, 1, 30.0))
        await asyncio.sleep(0)
        assert (await older)["grants"] == []
        await made.end_pull("w", epoch)
        assert (await newer)["grants"] == []

    asyncio.run(scene())
    check(tmp_path)


def test_an_old_self_cannot_speak_for_the_new_one(tmp_path):
    async def scene():
        made, old = await served(tmp_path)
        new = (await made.register("w", "n", "spot"))["epoch"]
        await made.admitted("w", new, 0, "d", 3)
        waiting = asyncio.create_task(made.pull("w", new, 1, 30.0))
        await asyncio.sleep(0)
        assert (await made.pull("w", old, 1, 30.0))["fenced"]
        assert (await made.renew("w", old, []))["fenced"]
        assert (await made.admitted("w", old, 0, "d", 3))["fenced"]
        await made.end_pull("w", old)
        await asyncio.sleep(0)
        assert not waiting.done()
        await made.submit([final(0)])
        reply = await waiting
        assert len(reply["grants"]) == 1
        assert not reply["fenced"]

    asyncio.run(scene())
    check(tmp_path)


def test_a_state_is_kept_resumed_and_forgotten(tmp_path):
    async def scene():
        made, epoch = await served(tmp_path)
        await made.submit([final(0)])
        (grant,) = (await made.pull("w", epoch, 1, 1.0))["grants"]
        assert (await made.save_state(grant["token"], 2, b"two"))["saved"]
        assert not (await made.save_state(grant["token"], 1, b"one"))["saved"], "late"
        await made.notice("n", 0.0, "test")
        reply = await made.renew("w", epoch, [{"token": grant["token"], "step": 2}])
        assert reply["stop_at"] == {grant["token"]: 3}
        assert (await made.save_states([(grant["token"], 3, b"three")]))[0]["stop_at"] == 3
        assert (await made.release(grant["token"]))["accepted"]
        assert (await made.save_state(grant["token"], 3, b"zombie")) == {
            "saved": False, "cancelled": True, "stop_at": None, "reason": "fenced",
        }  # fmt: skip
        await made.notice_withdrawn("n")
        (again,) = (await made.pull("w", epoch, 1, 1.0))["grants"]
        assert (again["resume_step"], again["state"]) == (3, b"three")
        assert (await made.snapshot())["state_bytes"] == 5
        done = outcome(again, num_steps=1, resumed_from=3)
        assert (await made.commit(again["token"], done))["accepted"]
        assert (await made.snapshot())["states"] == 0

    asyncio.run(scene())
    check(tmp_path)


@pytest.mark.parametrize(
    "call",
    [
        lambda c, e: c.register("w", "n", "boss"),
        lambda c, e: c.register(7, "n", "spot"),
        lambda c, e: c.pull("w", "1", 1, 0.0),
        lambda c, e: c.renew("w", e, [{"token": 1}]),
        lambda c, e: c.renew("w", e, [{"token": 1.5, "step": 0}]),
        lambda c, e: c.submit([final(0, num_steps=0)]),
        lambda c, e: c.submit([final(0), final("x")]),
        lambda c, e: c.submit([final(0, more=1)]),
        lambda c, e: c.commit(1, {"sample": "it1/row1/s0"}),
        lambda c, e: c.commit(1, {**outcome({"request": final(0), "version": 0}), "reward": float("nan")}),
        lambda c, e: c.commit(1, {**outcome({"request": final(0), "version": 0}), "info": {"x": object()}}),
        lambda c, e: c.publish(1.0, "d", 3),
        lambda c, e: c.notice("n", float("inf"), "x"),
        lambda c, e: c.note({"type": "on"}),
        lambda c, e: c.note({"no": "type"}),
        lambda c, e: c.note({"type": "x", "value": float("nan")}),
    ],
)
def test_a_call_with_what_cannot_be_is_refused_and_changes_nothing(tmp_path, call):
    async def scene():
        made, epoch = await served(tmp_path)
        before = await made.snapshot()
        records = len(list(journal.read(tmp_path)))
        with pytest.raises(DataError):
            await call(made, epoch)
        assert await made.snapshot() == before
        assert len(list(journal.read(tmp_path))) == records

    asyncio.run(scene())


def test_time_passes_and_a_silent_worker_is_found(tmp_path):
    async def scene():
        made, epoch = await served(tmp_path, policy={"dead_after_s": 0.2}, tick_s=0.02)
        await made.ready()
        await made.submit([final(0)])
        (grant,) = (await made.pull("w", epoch, 1, 1.0))["grants"]
        while (await made.snapshot())["workers"]:
            await asyncio.sleep(0.02)
        assert (await made.commit(grant["token"], outcome(grant))) == {"accepted": False, "reason": "fenced"}
        await made.stop()

    asyncio.run(scene())
    check(tmp_path)


def test_after_a_stop_pulls_say_so_and_everything_has_a_fate(tmp_path):
    async def scene():
        made, epoch = await served(tmp_path)
        waiting = asyncio.create_task(made.pull("w", epoch, 1, 30.0))
        await asyncio.sleep(0)
        await made.stop("budget")
        assert (await waiting)["stop"]
        await made.submit([final(0)])
        assert (await made.pull("w", epoch, 1, 30.0))["stop"]
        assert (await made.renew("w", epoch, []))["stop"]
        assert (await made.collect(0, 1.0))["items"] == [
            {"fate": "cancelled", "request": "final/it1/row1/s0", "reason": "budget"}
        ]

    asyncio.run(scene())
    check(tmp_path)


def test_drafts_through_the_planner_are_made_chosen_and_replayed(tmp_path):
    async def scene():
        made, epoch = await served(tmp_path, planner=PLANNER)
        spec = {"iteration": 1, "rows": [5, 9], "first_seed": 65536, "k": 2, "budget_s": 60.0}
        assert await made.open_drafts(spec)
        drafted = 0
        while not (await made.collect(0, 0.0))["drafts_complete"]:
            for grant in (await made.pull("w", epoch, 3, 1.0))["grants"]:
                assert grant["request"]["batch_key"] == "draft/4/16x32"
                reward = drafted / 10
                await made.commit(grant["token"], outcome(grant, reward=reward))
                drafted += 1
        assert drafted == 8
        plan = await made.close_drafts()
        assert [group["row"] for group in plan["groups"]] == [5, 9]
        assert all(len(group["seeds"]) == 2 for group in plan["groups"])
        await made.stop()

    asyncio.run(scene())
    check(tmp_path)


def test_a_new_coordinator_on_the_same_journal_gives_higher_tokens(tmp_path):
    async def scene():
        made, epoch = await served(tmp_path)
        await made.submit([final(0)])
        (grant,) = (await made.pull("w", epoch, 1, 1.0))["grants"]
        return grant["token"]

    first = asyncio.run(scene())
    assert asyncio.run(scene()) > first
    check(tmp_path)
