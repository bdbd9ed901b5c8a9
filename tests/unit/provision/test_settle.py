"""The books of a run against its cloud's own record: what was noticed late, never, or as something else."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from fakes.fake_account import LAUNCH

from spotlight.core import cost
from spotlight.core.billing import BillingRule, bill
from spotlight.core.cost import STILL_RUNNING, NodeEnded, NodeReady, NodeRequested, NodeUp, PricePoint
from spotlight.core.ledger import Interval, Ledger, NodeKey, ledger_from_records
from spotlight.core.money import usd_of
from spotlight.provision.base import NodeState
from spotlight.provision.ends import CloudEnd
from spotlight.provision.machines import Machine
from spotlight.provision.settle import settle

T0 = 1_772_000_000.0
HOUR = 3600.0


class Cloud:
    """A region that remembers `machines`, and `ends` of those that have ended; asked after more, it has forgotten."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self.ends: dict[str, CloudEnd | None] = {}
        self.asked: list[str] = []

    def ran(self, instance: str, node: str, began_s: float, end: CloudEnd | None = None) -> None:
        self.machines.append(
            Machine(
                instance=instance, node=node, zone="za", spot=node.startswith("s"), launched_s=began_s,
                state=NodeState.GONE if end else NodeState.UP,
            )
        )  # fmt: skip
        self.ends[instance] = end

    def of_run(self, run: str) -> list[Machine]:
        assert run == LAUNCH.run
        return self.machines

    def end_of(self, instance: str) -> CloudEnd | None:
        self.asked.append(instance)
        return self.ends.get(instance, CloudEnd("unknown", "ec2:not-found"))


def interrupted(at_s: float) -> CloudEnd:
    return CloudEnd("interrupted", "ec2:Server.SpotInstanceTermination", at_s)


def ended(at_s: float) -> CloudEnd:
    return CloudEnd("user", "ec2:Client.UserInitiatedShutdown", at_s)


class Books:
    """A run's journal, and what it says after it has been settled."""

    def __init__(self) -> None:
        self.cloud = Cloud()
        self.journal: list[cost.Record] = []

    def requested(self, node: str, at_s: float, launch: int = 0) -> None:
        market, gpus = LAUNCH.market(node)
        self.journal.append(NodeRequested(node=node, launch=launch, at_s=at_s, gpus=gpus, **market._asdict()))

    def saw(self, *records: cost.Record) -> None:
        self.journal += records

    def ledger(self) -> Ledger:
        return ledger_from_records([cost.encode(record) for record in self.journal])

    def settle(self, now_s: float, *, over: bool = False) -> dict[str, Interval]:
        self.journal += settle(self.ledger(), LAUNCH, now_s, over=over, machines=self.cloud, ends=self.cloud)
        again = settle(self.ledger(), LAUNCH, now_s, over=over, machines=self.cloud, ends=self.cloud)
        assert [r for r in again if not (isinstance(r, NodeEnded) and r.source == STILL_RUNNING)] == []
        return {f"{item.key.node}#{item.key.launch}": item for item in self.ledger().intervals}


@pytest.fixture
def books() -> Books:
    return Books()


def test_what_was_noticed_late_is_dated_back(books: Books) -> None:
    books.requested("s0", T0)
    books.saw(NodeUp(node="s0", at_s=T0 + 52, instance_id="i-1"), NodeReady(node="s0", at_s=T0 + 90))
    books.saw(NodeEnded(node="s0", at_s=T0 + 1000, reason="failed"))
    books.cloud.ran("i-1", "s0", T0 + 41, interrupted(T0 + 993))
    item = books.settle(T0 + 1100)["s0#0"]
    assert (item.up_s, item.ended_s, item.zone) == (T0 + 41, T0 + 993, "za")
    assert (item.end_reason, item.end_source) == ("interrupted", "ec2:Server.SpotInstanceTermination")


def test_a_clock_ahead_of_the_clouds_does_not_win(books: Books) -> None:
    books.requested("s0", T0 - 30)
    books.saw(
        NodeUp(node="s0", at_s=T0 - 20, instance_id="i-1"), NodeEnded(node="s0", at_s=T0 + 50, reason="user")
    )
    books.cloud.ran("i-1", "s0", T0, ended(T0 + 70))
    item = books.settle(T0 + 100)["s0#0"]
    assert (item.up_s, item.ended_s) == (T0, T0 + 70)


def test_a_machine_that_came_and_went_between_two_looks_is_billed(books: Books) -> None:
    """SkyPilot's first zone gave a machine that never answered; the books know only the second zone's."""
    books.requested("s0", T0)
    books.saw(NodeUp(node="s0", at_s=T0 + 300, instance_id="i-2"))
    books.cloud.ran("i-1", "s0", T0 + 10, ended(T0 + 200))
    books.cloud.ran("i-2", "s0", T0 + 250)
    found = books.settle(T0 + 400)
    assert {name: (item.up_s, item.ended_s) for name, item in found.items()} == {
        "s0#0": (T0 + 250, None),
        "i-1#0": (T0 + 10, T0 + 200),
    }
    assert found["i-1#0"].market() == replace(found["s0#0"], zone="za").market()


def test_a_machine_belongs_to_the_launch_that_asked_for_it(books: Books) -> None:
    books.requested("s0", T0)
    books.saw(NodeEnded(node="s0", at_s=T0 + 100, reason="launch_failed"))
    books.requested("s0", T0 + 200, launch=1)
    books.cloud.ran("i-2", "s0", T0 + 210)
    found = books.settle(T0 + 300)
    assert (found["s0#0"].instance_id, found["s0#1"].instance_id) == ("", "i-2")


def test_the_on_demand_part_is_older_than_its_books(books: Books) -> None:
    """All its machines carry the head's name: they are shared out, one a line."""
    for node in ("od0", "od1"):
        books.requested(node, T0 + 200)
        books.saw(NodeUp(node=node, at_s=T0 + 200))
    books.cloud.ran("i-1", "od0", T0)
    books.cloud.ran("i-2", "od0", T0 + 1)
    found = books.settle(T0 + 300)
    assert {item.instance_id: item.up_s for item in found.values()} == {"i-1": T0, "i-2": T0 + 1}
    assert found.keys() == {"od0#0", "od1#0"}


def test_a_run_in_progress_asks_only_after_those_that_it_saw_ending(books: Books) -> None:
    for node in ("s0", "s1"):
        books.requested(node, T0)
        books.saw(NodeUp(node=node, at_s=T0, instance_id=f"i-{node}"))
        books.cloud.ran(f"i-{node}", node, T0)
    books.saw(NodeEnded(node="s0", at_s=T0 + 9, reason="failed"))
    books.cloud.ends["i-s0"] = interrupted(T0 + 7)
    books.settle(T0 + 10)
    assert books.cloud.asked == ["i-s0"]


def test_a_run_that_is_over_has_its_head_s_end_from_the_cloud(books: Books) -> None:
    """The head wrote "ended" when its work was done, and then stood idle until it was taken down."""
    books.requested("od0", T0)
    books.saw(NodeUp(node="od0", at_s=T0), NodeEnded(node="od0", at_s=T0 + HOUR, reason="user"))
    books.cloud.ran("i-1", "od0", T0)
    assert books.settle(T0 + HOUR + 30)["od0#0"].ended_s == T0 + HOUR  # the head itself, at its end
    still = books.settle(T0 + HOUR + 300, over=True)["od0#0"]
    assert (still.ended_s, still.end_source) == (T0 + HOUR + 300, STILL_RUNNING)
    books.cloud.ends["i-1"] = ended(T0 + HOUR + 600)
    assert books.settle(T0 + 9 * HOUR, over=True)["od0#0"].ended_s == T0 + HOUR + 600


def test_a_machine_that_the_cloud_has_forgotten_keeps_the_end_that_was_seen(books: Books) -> None:
    books.requested("s0", T0)
    books.saw(
        NodeUp(node="s0", at_s=T0, instance_id="i-1"), NodeEnded(node="s0", at_s=T0 + 60, reason="failed")
    )
    item = books.settle(T0 + 99 * HOUR, over=True)["s0#0"]
    assert (item.ended_s, item.end_source) == (T0 + 60, "own")


def test_a_forgotten_machine_that_nobody_saw_ending_ended_itself_when_idle(books: Books) -> None:
    """A head that was killed; ten minutes after the last that was heard of it its machine ends itself."""
    books.requested("od0", T0)
    books.saw(NodeUp(node="od0", at_s=T0, instance_id="i-1"))
    books.requested("s0", T0)
    books.saw(
        NodeUp(node="s0", at_s=T0 + 10, instance_id="i-2"),
        NodeEnded(node="s0", at_s=T0 + HOUR, reason="interrupted", source="ec2:x"),
    )
    item = books.settle(T0 + 99 * HOUR, over=True)["od0#0"]
    assert (item.ended_s, item.end_reason) == (T0 + HOUR + 600, "unknown")


def test_a_launch_that_failed_before_there_was_a_journal_is_billed(books: Books) -> None:
    books.cloud.ran("i-1", "od0", T0, ended(T0 + 1800))
    found = books.settle(T0 + HOUR, over=True)
    assert found.keys() == {"i-1#0"}
    market, _ = LAUNCH.market("od0")
    books.saw(PricePoint(**market._asdict(), usd_per_h=Decimal(50), source="test"))
    assert usd_of(bill(books.ledger(), {"aws": BillingRule("aws")}, T0 + HOUR).units) == Decimal(25)


def test_a_machine_without_our_tag_is_nobody_s(books: Books) -> None:
    books.cloud.ran("i-1", "", T0)
    assert books.settle(T0 + 10) == {}


def test_a_resumed_head_does_not_book_its_machine_twice(tmp_path) -> None:
    from spotlight.config import BudgetConfig
    from spotlight.observe import journal
    from spotlight.runtime.accounts import Accounts

    for _ in range(2):
        accounts = Accounts(tmp_path, BudgetConfig(), rented=LAUNCH.market)
        for node in ("od0", "s0"):
            accounts.launched(node, "on_demand" if node == "od0" else "spot", "x")
            accounts.up(node)
        accounts.close()
    keys = [item.key for item in ledger_from_records(journal.read(tmp_path)).intervals]
    assert sorted(keys) == [NodeKey("od0", 0), NodeKey("s0", 0), NodeKey("s0", 1)]


def test_a_cloud_that_answers_nonsense_ends_no_run(tmp_path) -> None:
    from spotlight.config import BudgetConfig
    from spotlight.runtime.accounts import Accounts

    def nonsense(_: Ledger) -> list[cost.Record]:
        raise KeyError("LaunchTime")

    accounts = Accounts(tmp_path, BudgetConfig(), rented=LAUNCH.market, ask_cloud=nonsense)
    accounts.launched("od0", "on_demand", "trainer")
    accounts.up("od0")
    accounts.settle()
    accounts.close()
