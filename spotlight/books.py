"""The books of the runs on this machine: their journals, and what clouds and bills have said since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from spotlight import names
from spotlight.core.cost import STILL_RUNNING, NodeEnded, Record, encode
from spotlight.core.ledger import Ledger, ledger_from_records
from spotlight.errors import DataError, NotFoundError, SpotlightError, UserError
from spotlight.observe import bill, journal, jsonl, metrics
from spotlight.provision import invoices, live, prices
from spotlight.provision.launch import FILE, Launch
from spotlight.provision.prices import PriceBook
from spotlight.provision.settle import is_open, settle

CLOUD_SAYS = "cloud.jsonl"  # beside the journal, which others write


def run_cost(
    folder: Path, book: PriceBook, now_s: float, *, live_prices: bool, tolerant: bool
) -> bill.RunCost:
    """Ledger and scores of a run. `tolerant`: a run that cannot be read must not hide the others."""
    try:
        found = ledger(folder, now_s)
    except (DataError, NotFoundError) as error:
        if not tolerant:
            raise
        return bill.RunCost(folder.name, Ledger(warnings=(f"left out, not readable: {error}",)))
    if live_prices:
        points = live.in_force(found, now_s)
        live.keep(points, prices.cache(names.home()))
        found = live.at_prices_in_force(found, points)
    return bill.RunCost(folder.name, prices.fill(found, book), bill.scores_of(metrics.read(folder)))


def ledger(folder: Path, now_s: float) -> Ledger:
    """The ledger of a run. For a rented one its cloud is asked what is still open, and the answers are kept."""
    if not (folder / FILE).is_file():
        return ledger_from_records(journal.read(folder / "journal"))
    told = [*journal.read(folder / "journal")] if journal.segments(folder / "journal") else []
    told += jsonl.read(folder / CLOUD_SAYS)
    found = ledger_from_records(told)
    if found.intervals and not any(map(is_open, found.intervals)):
        return found
    try:
        news = settle(found, Launch.load(folder), now_s, over=True)
    except SpotlightError as error:
        unasked = f"times are our own, the cloud could not be asked: {error.message}"
        return replace(found, warnings=(*found.warnings, unasked))
    _keep(
        folder, (item for item in news if not (isinstance(item, NodeEnded) and item.source == STILL_RUNNING))
    )
    return ledger_from_records([*told, *map(encode, news)])


def reconcile(folders: Sequence[Path], invoice: Path, now_s: float) -> None:
    """Keep what a bill says of these runs' machines. Raises UserError when it settles none of them."""
    billed = invoices.read_aws(invoice)
    unfinished: list[str] = []
    settled = 0
    for folder in folders:
        records, why_not = invoices.reconcile(ledger(folder, now_s), billed, invoice.name)
        _keep(folder, records)
        settled += len(records)
        unfinished += why_not
    if not settled:
        raise UserError(
            f"{invoice}: bills no machine of these runs", hint=unfinished[0] if unfinished else None
        )


def _keep(folder: Path, records: Iterable[Record]) -> None:
    log = jsonl.JsonLines(folder / CLOUD_SAYS)
    for record in records:
        log.append(encode(record))
    log.close()
