"""The books of a rented run on the user's machine: what its cloud and its bill say is asked once and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.fake_account import LAUNCH

from spotlight import books
from spotlight.core import cost
from spotlight.core.cost import STILL_RUNNING, NodeEnded, NodeRequested, NodeUp
from spotlight.errors import PreconditionError, UserError
from spotlight.names import home
from spotlight.observe.journal import Journal

T0 = 1_772_445_600.0  # 2026-03-02T10:00Z
END_S, NOW_S = T0 + 3600.0, T0 + 7200.0
HEAD = "line_item_resource_id,line_item_line_item_type,line_item_usage_start_date,line_item_usage_end_date,"
BILL = f"""{HEAD}line_item_currency_code,line_item_unblended_cost
i-1,Usage,2026-03-02T10:00:00Z,2026-03-02T11:00:00Z,USD,12.34
"""


@pytest.fixture
def folder() -> Path:
    """A run whose journal knows a machine and no end of it."""
    found = home() / "runs" / LAUNCH.run
    journal = Journal(found / "journal")
    market, gpus = LAUNCH.market("s0")
    for record in (
        NodeRequested(node="s0", at_s=T0, gpus=gpus, **market._asdict()),
        NodeUp(node="s0", at_s=T0, instance_id="i-1"),
    ):
        journal.append(cost.encode(record))
    journal.close()
    LAUNCH.save(found)
    return found


class Cloud:
    """Answers with these records, or cannot be reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says: list[cost.Record] | None = []
        self.asked = 0
        monkeypatch.setattr(books, "settle", self.settle)

    def settle(self, ledger, launch, now_s, *, over):
        assert (launch.rows, over) == (LAUNCH.rows, True)
        self.asked += 1
        if self.says is None:
            raise PreconditionError("EC2 cannot be reached")
        return self.says


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return Cloud(monkeypatch)


ENDED = NodeEnded(node="s0", at_s=END_S, reason="interrupted", source="ec2:Server.SpotInstanceTermination")


def test_an_end_is_asked_for_once_and_kept(folder: Path, cloud: Cloud) -> None:
    cloud.says = [ENDED]
    for _ in range(2):
        (item,) = books.ledger(folder, NOW_S).intervals
        assert (item.ended_s, item.end_source) == (END_S, ENDED.source)
    assert cloud.asked == 1


def test_a_machine_that_runs_still_is_asked_about_again(folder: Path, cloud: Cloud) -> None:
    cloud.says = [NodeEnded(node="s0", at_s=NOW_S, reason="unknown", source=STILL_RUNNING)]
    for _ in range(2):
        (item,) = books.ledger(folder, NOW_S).intervals
        assert (item.ended_s, item.end_source) == (NOW_S, STILL_RUNNING)
    assert cloud.asked == 2
    assert not (folder / books.CLOUD_SAYS).exists()


def test_a_cloud_that_cannot_be_asked_is_told_of(folder: Path, cloud: Cloud) -> None:
    cloud.says = None
    (warning,) = books.ledger(folder, NOW_S).warnings
    assert "the cloud could not be asked: EC2 cannot be reached" in warning


def test_a_launch_that_left_no_journal_is_asked_about(cloud: Cloud) -> None:
    folder = home() / "runs" / "failed"
    folder.mkdir(parents=True)
    replace(LAUNCH, run="failed").save(folder)
    assert books.ledger(folder, NOW_S).intervals == ()
    assert cloud.asked == 1


def test_a_bill_settles_for_good_what_it_covers(folder: Path, cloud: Cloud, tmp_path: Path) -> None:
    (tmp_path / "bill.csv").write_text(BILL)
    with pytest.raises(UserError, match="bills no machine") as caught:
        books.reconcile([folder], tmp_path / "bill.csv", NOW_S)
    assert "s0" in (caught.value.hint or "")  # it runs still, as far as anybody knows
    cloud.says = [ENDED]
    books.reconcile([folder], tmp_path / "bill.csv", NOW_S)
    (billed,) = books.ledger(folder, NOW_S).billed.values()
    assert (str(billed.usd), billed.source) == ("12.34", "bill.csv")
    kinds = [json.loads(line)["kind"] for line in (folder / books.CLOUD_SAYS).read_text().splitlines()]
    assert kinds == ["ended", "billed"]
