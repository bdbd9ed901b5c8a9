"""A cloud's own bill, so that a report can say what was charged instead of what we reckon.

AWS: a Cost and Usage Report (or a data export) as CSV, plain or gzipped, with one row per resource and hour.
docs.aws.amazon.com/cur/latest/userguide/Lineitem-columns.html
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from spotlight.core.cost import NodeBilled, utc_seconds
from spotlight.core.ledger import Ledger, name
from spotlight.errors import DataError

# Both generations of the format: "lineItem/ResourceId" and "line_item_resource_id" are the same column.
_COLUMNS = {
    "resource": "lineitemresourceid",
    "kind": "lineitemlineitemtype",
    "usd": "lineitemunblendedcost",
    "currency": "lineitemcurrencycode",
    "start": "lineitemusagestartdate",
    "end": "lineitemusageenddate",
}
_NOT_OURS = {"Tax", "Credit", "Refund"}  # a report says that these are not included
_SLACK_S = 60.0


@dataclass(slots=True)
class Billed:
    """What a bill says of one resource, and the time it covers (UTC seconds)."""

    usd: Decimal
    start_s: float
    end_s: float


def read_aws(path: Path) -> dict[str, Billed]:
    """Charges by resource id. Raises DataError naming the line for a file that is no such report."""
    found: dict[str, Billed] = {}
    try:
        with closing(_rows(path)) as rows:
            for line, row in rows:
                _add(found, row, f"{path.name}, line {line}")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    return found


def reconcile(
    ledger: Ledger, billed: Mapping[str, Billed], source: str
) -> tuple[list[NodeBilled], list[str]]:
    """Records of what each machine was charged, and why others have none: a bill may not be complete yet."""
    records, open_ones = [], []
    for item in ledger.intervals:
        charge = billed.get(item.instance_id)
        if charge is None or item.up_s is None:
            continue
        if item.ended_s is None or charge.end_s < item.ended_s or charge.start_s > item.up_s + _SLACK_S:
            open_ones.append(f"{name(item.key)}: the bill does not cover all of its time yet")
            continue
        node, launch = item.key
        records.append(NodeBilled(node=node, launch=launch, usd=charge.usd, source=source))
    return records, open_ones


def _rows(path: Path) -> Generator[tuple[int, dict[str, str]], None, None]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        names = [column.lower().replace("/", "").replace("_", "") for column in next(reader, [])]
        missing = [column for column in _COLUMNS.values() if column not in names]
        if missing:
            raise DataError(
                f"{path}: not a Cost and Usage Report with resource ids (no {missing[0]})",
                hint="export it as CSV with resource ids included",
            )
        places = {key: names.index(column) for key, column in _COLUMNS.items()}
        for row in reader:
            if len(row) == len(names):
                yield reader.line_num, {key: row[place] for key, place in places.items()}
            elif row:
                raise DataError(f"{path.name}, line {reader.line_num}: {len(row)} columns, not {len(names)}")


def _add(found: dict[str, Billed], row: Mapping[str, str], where: str) -> None:
    resource = row["resource"].rpartition("/")[2]  # an instance may stand there as its ARN
    if not resource or row["kind"] in _NOT_OURS:
        return
    try:
        usd = Decimal(row["usd"] or "0")
        start_s, end_s = utc_seconds(row["start"]), utc_seconds(row["end"])
    except (ValueError, InvalidOperation) as error:
        raise DataError(f"{where}: {error or 'not a number'}") from None
    if not usd.is_finite() or row["currency"] != "USD":
        raise DataError(f"{where}: {row['usd']} {row['currency']}, and not dollars")
    before = found.setdefault(resource, Billed(Decimal(0), start_s, end_s))
    before.usd += usd
    before.start_s, before.end_s = min(before.start_s, start_s), max(before.end_s, end_s)
