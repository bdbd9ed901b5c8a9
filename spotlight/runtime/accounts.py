"""What a run's machines cost, kept while it runs: the journal hears of every machine, the budget of every dollar.

The journal has one writer. As long as the coordinator lives that is the coordinator, and records go through it;
afterwards the accounts open the journal themselves, to write down how the last machines ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

from spotlight.config import BudgetConfig
from spotlight.core import cost
from spotlight.core.billing import BillingRule, bill
from spotlight.core.budget import BudgetGuard, Forecast
from spotlight.core.cost import EndReason, Market, PriceClass, PricePoint, Record
from spotlight.core.ledger import Ledger, LedgerReader, ledger_from_records
from spotlight.core.money import usd_of
from spotlight.names import home
from spotlight.observe import journal
from spotlight.observe.bill import what_if
from spotlight.observe.node_book import NodeBook
from spotlight.provision import prices

GPUS_PER_H100_MACHINE = 8
LOCAL_RESERVE_S = 60.0  # a local checkpoint and the end of a few processes
AskCloud = Callable[[Ledger], Iterable[Record]]  # what the cloud's own record adds to these books
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Dollars so far, per hour, and for the same machines on demand only."""

    usd: float
    usd_per_h: float
    usd_on_demand: float


class Accounts:
    """The books of a run. Own machines are counted as what they would have cost as GPUs of a rented one.

    `rented` says which market a rented node is of, and how many GPUs it has; without it all machines are own.
    `ask_cloud` is asked by `settle`, from a thread of its own.
    """

    def __init__(
        self,
        folder: Path,
        budget: BudgetConfig,
        rented: Callable[[str], tuple[Market, int]] | None = None,
        ask_cloud: AskCloud = lambda _: (),
    ) -> None:
        self._folder = folder
        self._rented = rented
        self._ask_cloud = ask_cloud
        self._lock = (
            threading.RLock()
        )  # the fleet, the driver and whoever settles come from threads of their own
        self._up: set[str] = set()
        self._coordinator: Any = None
        self._waiting: list[dict[str, Any]] = []
        self._reader = LedgerReader()
        self._open: set[str] = set()
        known = ledger_from_records(journal.read(folder)) if journal.segments(folder) else Ledger()
        # A head that goes on stands on the machine that it stood on; spot machines were ended with it.
        self._standing = {i.key.node for i in known.intervals if rented and i.price_class == "on_demand"}
        self._book = NodeBook(self._append, known=known)
        self._began = time.time()
        self._guard = BudgetGuard(
            budget_usd=None if budget.usd is None else Decimal(str(budget.usd)),
            max_hours=budget.hours,
            reserve_s=LOCAL_RESERVE_S,
        )

    def through(self, coordinator: Any) -> None:
        """From now on the coordinator writes; what happened before it was there goes first."""
        with self._lock:
            self._coordinator = coordinator
            for record in self._waiting:
                coordinator.note.remote(record)
            self._waiting.clear()

    def launched(self, node: str, price_class: PriceClass, role: str) -> None:
        """A machine was asked for; one of our own is there at once."""
        if node in self._standing:
            self._open.add(node)
            self._up.add(node)
            return
        market, gpus = Market("local", "", "", "this machine", price_class), 1
        if self._rented is not None:
            market, gpus = self._rented(node)
        self._open.add(node)
        self._book.requested(node, market, gpus=gpus, role=role)
        if self._rented is None:
            self.up(node)

    def up(self, node: str, *, zone: str = "", instance: str = "") -> None:
        """The machine exists. Said again: nothing happens."""
        if node in self._open and node not in self._up:
            self._up.add(node)
            self._book.up(node, zone=zone, instance_id=instance)

    def price(self, point: PricePoint) -> None:
        """A price of a rented machine."""
        self._book.price(point)

    def ready(self, node: str) -> None:
        """The node takes work."""
        self._book.ready(node)

    def notice(self, node: str) -> None:
        """It was announced that the node will be taken."""
        self._book.notice(node)

    def ended(self, node: str, reason: EndReason) -> None:
        """The node is gone."""
        if node in self._open:
            self._open.discard(node)
            self._up.discard(node)
            self._book.ended(node, reason)

    def settle(self) -> None:
        """Take over what the cloud's own record says of the machines. A cloud that does not answer changes nothing."""
        try:
            for record in self._ask_cloud(self._ledger()):
                self._book.record(record)
        except Exception as error:  # noqa: BLE001 - no answer, however odd, may end a run
            log.warning("the cloud's record of the machines: %s", error)

    def estimate(self) -> Estimate | None:
        """Rented machines at their prices, own ones as GPUs of an 8x H100 machine; None where no price is known."""
        now, ledger = time.time(), self._ledger()
        if self._rented is not None:
            return self._as_rented(ledger, now)
        if not self._h100:
            return None
        usd = self._as_h100(ledger, self._h100, now)
        on_demand: dict[PriceClass, PricePoint] = {"on_demand": self._h100["on_demand"]}
        return Estimate(
            usd=usd,
            usd_per_h=self._as_h100(ledger, self._h100, now + 3600.0) - usd,
            usd_on_demand=self._as_h100(ledger, on_demand, now),
        )

    def forecast(self) -> Forecast:
        """Whether the run may go on: `stop` says no, `reason` why."""
        return self._guard.forecast(self._ledger(), self._rules, time.time(), self._began)

    def close(self) -> None:
        """The coordinator is gone, and with it every machine that was still there."""
        if not self._folder.is_dir():
            return
        writer = journal.Journal(self._folder)
        self._coordinator = None
        for node in sorted(self._open):
            self._book.ended(node, "user")
        self.settle()
        for record in self._waiting:
            writer.append(record)
        self._waiting.clear()
        self._open.clear()
        writer.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._reader.add(cost.decode(record))
            if self._coordinator is None:
                self._waiting.append(dict(record))
            else:
                self._coordinator.note.remote(dict(record))

    def _ledger(self) -> Ledger:
        with self._lock:
            return self._reader.ledger()

    def _as_rented(self, ledger: Ledger, now_s: float) -> Estimate:
        on_demand = replace(
            ledger,
            intervals=tuple(replace(item, price_class="on_demand", zone="") for item in ledger.intervals),
        )
        usd, later, full = (
            float(usd_of(bill(books, self._rules, at_s).units))
            for books, at_s in ((ledger, now_s), (ledger, now_s + 3600.0), (on_demand, now_s))
        )
        return Estimate(usd=usd, usd_per_h=later - usd, usd_on_demand=full)

    def _as_h100(self, ledger: Ledger, h100: Mapping[PriceClass, PricePoint], now_s: float) -> float:
        charged = what_if(ledger, h100, GPUS_PER_H100_MACHINE, self._rules, now_s)
        return float(usd_of(charged.units))

    @cached_property
    def _h100(self) -> dict[PriceClass, PricePoint]:
        return prices.h100_prices(prices.default_book(home()))

    @cached_property
    def _rules(self) -> dict[str, BillingRule]:
        return prices.load_rules()
