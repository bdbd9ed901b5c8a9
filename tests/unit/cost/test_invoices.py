"""A cloud's own bill read, matched machine by machine, and refused where it is not complete or not a bill."""

from __future__ import annotations

import gzip
import re
from decimal import Decimal
from pathlib import Path

import pytest
from ledgers import RULES, ledger, utc

from spotlight.core.billing import bill
from spotlight.core.cost import encode
from spotlight.core.ledger import ledger_from_records
from spotlight.core.money import usd_of
from spotlight.errors import DataError
from spotlight.provision import invoices

COLUMNS = ("ResourceId", "LineItemType", "UsageStartDate", "UsageEndDate", "CurrencyCode", "UnblendedCost")
OLD = ",".join(f"lineItem/{column}" for column in COLUMNS)
NEW = ",".join("line_item" + re.sub("([A-Z])", r"_\1", column).lower() for column in COLUMNS)
HOURS = [("2026-03-02T10:00:00Z", "2026-03-02T11:00:00Z"), ("2026-03-02T11:00:00Z", "2026-03-02T12:00:00Z")]


def row(resource: str, hour: int, usd: str, kind: str = "Usage", currency: str = "USD") -> str:
    return ",".join([resource, kind, *HOURS[hour], currency, usd])


def write(path: Path, *rows: str, header: str = OLD) -> Path:
    text = "\n".join([header, *rows]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def books(ended: str | None = "2026-03-02T11:40Z"):
    node = {"up": "2026-03-02T10:20Z"} | ({"ended": ended} if ended else {})
    up = {"kind": "up", "node": "n0", "at_s": utc("2026-03-02T10:20Z"), "instance_id": "i-1", "source": "aws"}
    return ledger(node, more=[up])


@pytest.mark.parametrize("header", [OLD, NEW])
@pytest.mark.parametrize("name", ["bill.csv", "bill.csv.gz"])
def test_what_was_charged_replaces_what_was_reckoned(tmp_path: Path, header: str, name: str) -> None:
    path = write(
        tmp_path / name, row("i-1", 0, "9.5"), row("i-2", 0, "77"), row("i-1", 1, "10.25"), row("", 1, "3"),
        row("i-1", 1, "0.75", "SavingsPlanNegation"), row("i-1", 1, "4", "Tax"), row("i-1", 1, "-20", "Credit"),
        header=header,
    )  # fmt: skip
    records, open_ones = invoices.reconcile(books(), invoices.read_aws(path), path.name)
    (record,) = records
    assert (record.node, record.usd, record.source, open_ones) == ("n0", Decimal("20.5"), name, [])
    settled = ledger_from_records(
        [
            {"type": "node", "kind": "requested", "node": "n0", "at_s": utc("2026-03-02T10:20Z"), "cloud": "aws",
             "instance_type": "p5.48xlarge", "gpus": 8, "price_class": "spot"},
            {"type": "node", "kind": "up", "node": "n0", "at_s": utc("2026-03-02T10:20Z")},
            {"type": "node", "kind": "ended", "node": "n0", "at_s": utc("2026-03-02T11:40Z"), "reason": "user"},
            encode(record),
        ]
    )  # fmt: skip
    assert usd_of(bill(settled, RULES, utc("2026-03-03T00:00Z")).units) == Decimal("20.5")


def test_an_arn_is_the_instance_in_it(tmp_path: Path) -> None:
    path = write(tmp_path / "b.csv", row("arn:aws:ec2:us-east-1:1234:instance/i-1", 0, "1"))
    assert invoices.read_aws(path).keys() == {"i-1"}


@pytest.mark.parametrize("ended", [None, "2026-03-02T12:30Z"])
def test_a_bill_that_is_not_complete_settles_nothing(tmp_path: Path, ended: str | None) -> None:
    path = write(tmp_path / "b.csv", row("i-1", 0, "9"), row("i-1", 1, "9"))
    records, open_ones = invoices.reconcile(books(ended), invoices.read_aws(path), "b")
    assert records == []
    assert open_ones == ["n0: the bill does not cover all of its time yet"]


def test_a_bill_that_begins_too_late_settles_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "b.csv", row("i-1", 1, "9"))
    assert invoices.reconcile(books(), invoices.read_aws(path), "b")[0] == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((row("i-1", 0, "9", currency="EUR"),), "line 2: 9 EUR"),
        ((row("i-1", 0, "x"),), "line 2"),
        ((row("i-1", 0, "nan"),), "line 2"),
        (("i-1,Usage,yesterday,today,USD,1",), "line 2"),
        (("i-1,Usage,2026-03-02T10:00:00,2026-03-02T11:00:00,USD,1",), "without an offset"),
        ((row("i-1", 0, "1") + ",more",), "line 2: 7 columns, not 6"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, rows: tuple[str, ...], said: str) -> None:
    with pytest.raises(DataError, match=said):
        invoices.read_aws(write(tmp_path / "bill.csv", *rows))


@pytest.mark.parametrize("data", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00", b"lineItem/ResourceId\n"])
@pytest.mark.parametrize("name", ["bill.csv", "bill.csv.gz"])
def test_a_file_that_is_no_bill_is_refused(tmp_path: Path, data: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=r"bill\.csv"):
        invoices.read_aws(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read"):
        invoices.read_aws(tmp_path / "none.csv")
