"""Makes a run's books agree with the cloud's own record: when each machine began, when and why it ended.

What a run notices is late by a look or two, and a run that is over notices nothing; the cloud bills by its own record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from spotlight.core.cost import OWN_SOURCE, STILL_RUNNING, NodeEnded, NodeRequested, NodeUp, Record
from spotlight.core.ledger import Interval, Ledger, NodeKey
from spotlight.provision.base import NodeState
from spotlight.provision.ends import EndSource, end_source
from spotlight.provision.launch import IDLE_MINUTES, Launch
from spotlight.provision.machines import Machine, MachineList, machine_list

SLACK_S = 5.0  # between a cloud's clock and ours


def settle(
    ledger: Ledger,
    launch: Launch,
    now_s: float,
    *,
    over: bool = False,
    machines: MachineList | None = None,
    ends: EndSource | None = None,
) -> list[Record]:
    """Records that bring a run's ledger up to what its cloud says at `now_s` (UTC seconds); none when it is.

    A machine that the books do not know becomes a line of its own, under its instance's name. `over`: nobody writes
    these books any more, so ask about every machine, and count one that lives up to `now_s` (STILL_RUNNING).
    Raises CredentialError or PreconditionError when the cloud cannot be asked.
    """
    machines = machines or machine_list(launch.cloud, launch.region)
    ends = ends or end_source(launch.cloud, launch.region)
    books = {item.key: item for item in ledger.intervals if item.cloud == launch.cloud}
    records: list[Record] = []
    gone: set[str] = set()
    nodes = launch.nodes()
    for machine in sorted(machines.of_run(launch.run), key=lambda m: (m.launched_s, m.instance)):
        if machine.node in nodes:
            records += _begun(machine, books, launch)
            gone |= {machine.instance} if machine.state is NodeState.GONE else set()
    last_s = max((item.ended_s or item.up_s or 0.0 for item in books.values()), default=now_s)
    for item in books.values():
        if item.instance_id and is_open(item, over or item.instance_id in gone):
            records += _ended(item, ends, now_s, last_s + IDLE_MINUTES * 60, over)
    return records


def _begun(machine: Machine, books: dict[NodeKey, Interval], launch: Launch) -> Iterator[Record]:
    """Enter a machine's beginning into the books, and say what is new."""
    item = _interval_of(machine, books)
    if item is None:
        market, gpus = launch.market(machine.node)
        role = "explorer" if machine.spot else "trainer"
        asked = NodeRequested(
            node=machine.instance, at_s=machine.launched_s, gpus=gpus, role=role, **market._asdict()
        )
        yield asked
        item = Interval(NodeKey(machine.instance, 0), gpus=gpus, role=role, **market._asdict())
    if (item.instance_id, item.up_s) != (machine.instance, machine.launched_s):
        yield NodeUp(
            node=item.key.node, launch=item.key.launch, at_s=machine.launched_s, zone=machine.zone,
            instance_id=machine.instance, source=launch.cloud,
        )  # fmt: skip
    books[item.key] = replace(item, instance_id=machine.instance, up_s=machine.launched_s)


def _interval_of(machine: Machine, books: dict[NodeKey, Interval]) -> Interval | None:
    """The machine's line: the one with its id, else the newest of its name that has none and was open then."""
    for item in books.values():
        if item.instance_id == machine.instance:
            return item
    fits = [
        item
        for item in books.values()
        if not item.instance_id
        and (item.key.node == machine.node if machine.spot else item.price_class == "on_demand")
        and (item.requested_s or 0.0) <= machine.launched_s + SLACK_S + _head_start_s(machine)
        and (item.ended_s is None or item.ended_s >= machine.launched_s - SLACK_S)
    ]
    return min(fits, key=lambda item: (-(item.requested_s or 0.0), item.key), default=None)


def _head_start_s(machine: Machine) -> float:
    """The on-demand part is entered only once it runs; its machines are older than its lines."""
    return 0.0 if machine.spot else float("inf")


def is_open(item: Interval, over: bool = True) -> bool:
    """Whether the cloud has yet to say how this machine ended. `over`: those that nobody saw ending count too."""
    if item.ended_s is None:
        return over
    return item.end_source in (OWN_SOURCE, "relaunch", STILL_RUNNING)


def _ended(
    item: Interval, ends: EndSource, now_s: float, forgotten_s: float, over: bool
) -> Iterator[NodeEnded]:
    """What the cloud says of a machine's end. One that it has forgotten keeps the end that we saw, if any."""
    end = ends.end_of(item.instance_id)
    node, launch = item.key
    if end is None:
        if over:
            yield NodeEnded(node=node, launch=launch, at_s=now_s, reason="unknown", source=STILL_RUNNING)
    elif end.at_s is not None or end.reason != "unknown":
        yield end.record(node, launch, seen_s=now_s if item.ended_s is None else item.ended_s)
    elif item.ended_s is None:
        yield end.record(node, launch, seen_s=min(now_s, forgotten_s))
