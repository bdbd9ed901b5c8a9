"""Whatever happens to a journal on a disk, whoever reads it gets a verdict or one clear error that names the record."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from fakes.scheduler_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotlight.core import cost
from spotlight.core import events as ev
from spotlight.core.ledger import ledger_from_records
from spotlight.errors import DataError
from spotlight.observe import journal
from spotlight.observe.verify import replay, verify

HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
ODD = st.sampled_from(
    [
        None,
        True,
        -1,
        0.5,
        2**70,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "it1/row1/s1",
        [],
        {},
        [None],
        "\ud800",
    ]
)


def a_run() -> list[dict[str, Any]]:
    """Two nodes, one of which is lost; three finals; machines and phases."""
    world = World()
    world.publish()
    world.join("a")
    world.join("b")
    world.submit(3)
    lost, kept = world.pull("a", 2)
    world.save(lost, 2)
    world.commit(kept)
    world.say(ev.NodeLost("node-a", "preempted"))
    for _ in range(2):
        for grant in world.pull("b"):
            world.commit(grant)
    world.say(ev.Stop("finished"))
    market = {"cloud": "aws", "instance_type": "x", "gpus": 1, "price_class": "spot"}
    machines = [
        cost.NodeRequested(node="node-a", at_s=1.0, **market),
        cost.NodeUp(node="node-a", at_s=2.0),
        cost.NodeEnded(node="node-a", at_s=50.0, reason="interrupted"),
    ]
    phases = [
        {"type": "phase", "phase": "train", "iteration": 1, "state": s, "now": 100.0}
        for s in ("begin", "end")
    ]
    records = world.records + [cost.encode(machine) for machine in machines] + phases
    return [{"v": 1, "utc": 100.0, **record, "seq": seq} for seq, record in enumerate(records, 1)]


RUN = a_run()


def read_by_all(folder: Path) -> None:
    """Each of them may say that it cannot be read, and nothing else."""
    for reader in (verify, replay, lambda folder: ledger_from_records(journal.read(folder))):
        with contextlib.suppress(DataError):
            reader(folder)


def test_the_run_itself_is_in_order(tmp_path: Path) -> None:
    (tmp_path / "000001.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RUN))
    assert all(verdict.ok for verdict in [*verify(tmp_path), replay(tmp_path)])


@HERE
@given(st.data())
def test_one_value_is_another(tmp_path: Path, data: st.DataObject) -> None:
    records = json.loads(json.dumps(RUN))
    place: Any = records
    while isinstance(place, (dict, list)) and place:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        holder, place = place, place[key]
        if data.draw(st.booleans()) and holder is not records:
            break
    if data.draw(st.booleans()):
        holder[key] = data.draw(ODD)
    else:
        del holder[key]
    (tmp_path / "000001.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    read_by_all(tmp_path)


@HERE
@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_one_byte_is_another_or_the_end(tmp_path: Path, at: int, byte: int, cut: bool) -> None:
    whole = "".join(json.dumps(record) + "\n" for record in RUN).encode()
    at %= len(whole)
    (tmp_path / "000001.jsonl").write_bytes(
        whole[:at] if cut else whole[:at] + bytes([byte]) + whole[at + 1 :]
    )
    read_by_all(tmp_path)


@HERE
@given(st.lists(st.integers(0, len(RUN) - 1), max_size=2 * len(RUN)))
def test_lines_are_missing_doubled_or_in_another_order(tmp_path: Path, order: list[int]) -> None:
    (tmp_path / "000001.jsonl").write_text("".join(json.dumps(RUN[index]) + "\n" for index in order))
    read_by_all(tmp_path)
