"""What every source of end reasons must do, whatever the cloud; run by one test module per cloud.

A world makes machines and ends them: `run() -> instance`, `interrupt`, `terminate`, `stop` and
`interrupt_to_stop`; `never_existed` names none; `source` is the object under test.
"""

from __future__ import annotations

import time


def running_has_no_end(world):
    assert world.source.end_of(world.run()) is None


def taken_by_the_cloud(world):
    taken, other = world.run(), world.run()
    before_s = time.time()
    world.interrupt(taken)
    end = world.source.end_of(taken)
    assert end.reason == "interrupted"
    assert end.source.startswith(world.prefix)
    assert not end.keeps_disk
    assert end.at_s is None or before_s - 1 <= end.at_s <= time.time() + 1
    assert world.source.end_of(other) is None


def ended_by_us(world):
    instance = world.run()
    before_s = time.time()
    world.terminate(instance)
    end = world.source.end_of(instance)
    assert (end.reason, end.keeps_disk) == ("user", False)
    assert before_s - 1 <= end.at_s <= time.time() + 1


def stopped_by_us_keeps_its_disk(world):
    instance = world.run()
    world.stop(instance)
    end = world.source.end_of(instance)
    assert (end.reason, end.keeps_disk) == ("stopped", True)


def interrupted_into_a_stop_keeps_its_disk(world):
    instance = world.run()
    world.interrupt_to_stop(instance)
    end = world.source.end_of(instance)
    assert (end.reason, end.keeps_disk) == ("interrupted", True)


def forgotten_is_unknown(world):
    end = world.source.end_of(world.never_existed)
    assert (end.reason, end.at_s) == ("unknown", None)


def the_record_carries_the_cloud_s_words(world):
    instance = world.run()
    world.interrupt(instance)
    record = world.source.end_of(instance).record("s3", 2, seen_s=123.0)
    assert (record.node, record.launch, record.reason) == ("s3", 2, "interrupted")
    assert record.source.startswith(world.prefix)


CONTRACT = [
    running_has_no_end, taken_by_the_cloud, ended_by_us, stopped_by_us_keeps_its_disk,
    interrupted_into_a_stop_keeps_its_disk, forgotten_is_unknown, the_record_carries_the_cloud_s_words,
]  # fmt: skip
