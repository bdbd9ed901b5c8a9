"""What a machine costs now, from whom we know it, and since when.

Sources, all as `Quote`s: live ones (`live`), SkyPilot's catalog on disk, the last live prices kept
in a cache file, and a small table in this package. Catalogs hold errors, so every quote passes `screen`. A
price that nobody knows is None, never 0; one that is only a substitute says so in its source.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from spotlight.core.billing import BillingRule
from spotlight.core.cost import Market, PriceClass, PricePoint, amount
from spotlight.core.ledger import Ledger
from spotlight.errors import DataError

_FLOOR = Decimal("0.1")  # catalogs list just a tenth of the on-demand price where there is no spot market
_DEEPEST = Decimal("0.09")  # no cloud claims a discount beyond 91 %
_MAX_OFF_MEDIAN = 2
_MIN_QUOTES_FOR_MEDIAN = 3


@dataclass(frozen=True, slots=True)
class Quote:
    """One price of one market. `as_of` is an ISO date; `problem` says why it is not to be believed."""

    market: Market
    usd_per_h: Decimal
    source: str
    as_of: str
    problem: str = ""

    def point(self, at_s: float) -> PricePoint:
        """The journal record that this price holds from `at_s` (UTC seconds) on."""
        return PricePoint(
            **self.market._asdict(), at_s=at_s, usd_per_h=self.usd_per_h, source=self.source, as_of=self.as_of
        )


class PriceBook:
    """Looks a market up among screened quotes: the exact zone first, the newest first."""

    def __init__(self, quotes: Iterable[Quote]) -> None:
        self._by_market: dict[Market, list[Quote]] = defaultdict(list)
        self.rejected: list[Quote] = []
        for quote in screen(quotes):
            if quote.problem:
                self.rejected.append(quote)
            else:
                self._by_market[quote.market].append(quote)
        for known in self._by_market.values():
            known.sort(key=lambda quote: quote.as_of, reverse=True)

    def find(self, market: Market) -> Quote | None:
        """The price of `market`, or the dearest plausible substitute, named as one; None if there is none.

        Spot: the zone's price, else the region's, else the dearest zone of the region, else the on-demand
        price, which spot does not exceed for long. On demand: the region's price.
        """
        region = market._replace(zone="")
        for exact in (market, region):
            if known := self._by_market.get(exact):
                return replace(known[0], market=market)
        if market.price_class != "spot":
            return None
        zones = [known[0] for m, known in self._by_market.items() if m._replace(zone="") == region]
        if zones:
            dearest = max(zones, key=lambda quote: quote.usd_per_h)
            source = f"{dearest.source}, dearest zone of {market.region} ({dearest.market.zone})"
            return replace(dearest, market=market, source=source)
        if known := self._by_market.get(region._replace(price_class="on_demand")):
            return replace(known[0], market=market, source=f"{known[0].source}, on-demand price as ceiling")
        return None


def default_book(home: Path) -> PriceBook:
    """Everything known without asking the network: last known live prices, SkyPilot's catalog, our table."""
    return PriceBook([*cache(home).load(), *catalog_quotes(), *packaged_quotes()])


def cache(home: Path) -> PriceCache:
    """The last live prices that this machine has seen."""
    return PriceCache(home / "prices.json")


def h100_prices(book: PriceBook) -> dict[PriceClass, PricePoint]:
    """Prices of the 8x H100 machine that runs on own hardware are compared with: p5.48xlarge in Ohio."""
    classes: tuple[PriceClass, ...] = ("spot", "on_demand")
    quotes = (book.find(Market("aws", "us-east-2", "", "p5.48xlarge", each)) for each in classes)
    return {quote.market.price_class: quote.point(-math.inf) for quote in quotes if quote}


def fill(ledger: Ledger, book: PriceBook) -> Ledger:
    """The ledger with prices from the book where the run recorded none, also for the on-demand comparison."""
    found: dict[Market, tuple[PricePoint, ...]] = {}
    for item in ledger.intervals:
        for market in (item.market(), item.market("on_demand")):
            if not ledger.series(market) and (quote := book.find(market)):
                found[market] = (quote.point(-math.inf),)
    return replace(ledger, prices={**ledger.prices, **found})


def screen(quotes: Iterable[Quote]) -> list[Quote]:
    """Mark the quotes that cannot be true; those marked already stay marked.

    Rules: not above 0; spot at or above the on-demand price, at exactly a tenth of it (no market there) or
    deeper than any discount; more than twice or less than half the median of the same machine. On-demand
    prices enter the median once a region, since catalogs repeat them for every zone.
    """
    quotes = list(quotes)
    on_demand = {
        (q.market.cloud, q.market.region, q.market.instance_type): q.usd_per_h
        for q in sorted(quotes, key=lambda q: q.as_of)
        if q.market.price_class == "on_demand"
    }
    medians = _medians(quotes)
    return [
        quote if quote.problem else replace(quote, problem=_problem(quote, on_demand, medians))
        for quote in quotes
    ]


def _problem(
    quote: Quote, on_demand: dict[tuple[str, str, str], Decimal], medians: dict[tuple[str, str, str], Decimal]
) -> str:
    market, usd = quote.market, quote.usd_per_h
    if usd <= 0:
        return "not above 0"
    full = on_demand.get((market.cloud, market.region, market.instance_type))
    if market.price_class == "spot" and full:
        if usd >= full:
            return f"spot is not below the on-demand price of ${full}"
        if abs(usd - full * _FLOOR) <= Decimal("0.0001"):
            return f"exactly a tenth of the on-demand price of ${full}: no market"
        if usd < full * _DEEPEST:
            return f"below {_DEEPEST:.0%} of the on-demand price of ${full}"
    middle = medians.get((market.cloud, market.instance_type, market.price_class))
    if middle and not middle / _MAX_OFF_MEDIAN <= usd <= middle * _MAX_OFF_MEDIAN:
        return f"more than {_MAX_OFF_MEDIAN}x off the median of ${middle}"
    return ""


def _medians(quotes: Iterable[Quote]) -> dict[tuple[str, str, str], Decimal]:
    prices: dict[tuple[str, str, str], dict[str, Decimal]] = defaultdict(dict)
    for quote in quotes:
        market = quote.market
        place = market.region if market.price_class == "on_demand" else f"{market.region}/{market.zone}"
        prices[market.cloud, market.instance_type, market.price_class][place] = quote.usd_per_h
    return {key: median(by.values()) for key, by in prices.items() if len(by) >= _MIN_QUOTES_FOR_MEDIAN}


# --- sources


def load_rules() -> dict[str, BillingRule]:
    """The billing rules of all clouds that we know, from the package's data."""
    raw: dict[str, dict[str, Any]] = yaml.safe_load(_data("billing.yaml"))
    return {cloud: _rule(cloud, fields) for cloud, fields in raw.items()}


def _rule(cloud: str, fields: dict[str, Any]) -> BillingRule:
    disk = fields.pop("disk_usd_per_gb_month", None)
    source = f"{fields.pop('source')} [{fields.pop('status')}]"
    return BillingRule(
        cloud, disk_usd_per_gb_month=None if disk is None else amount(disk), source=source, **fields
    )


def packaged_quotes() -> list[Quote]:
    """The small dated table of this package."""
    lines = [line for line in _data("prices.csv").splitlines() if not line.startswith("#")]
    return [
        Quote(
            Market(row["cloud"], row["region"], row["zone"], row["instance_type"], row["price_class"]),  # type: ignore[arg-type]
            amount(row["usd_per_h"]),
            f"{row['source']}, table of this package",
            row["as_of"],
        )
        for row in csv.DictReader(lines)
    ]


def catalog_quotes(folder: Path | None = None) -> Iterator[Quote]:
    """Quotes from SkyPilot's catalog on disk; nothing if there is none. Rows without a price are left out.

    `folder` holds `<cloud>/vms.csv`; by default the newest schema under SkyPilot's home. GCP is left out:
    there host and GPUs are rows of their own, and their sum is SkyPilot's to make.
    """
    folder = folder or _catalog_folder()
    if folder is None:
        return
    for path in sorted(folder.glob("*/vms.csv")):
        as_of = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.DictReader(file):
                yield from _catalog_row(path.parent.name, row, as_of)


def _catalog_row(cloud: str, row: dict[str, str], as_of: str) -> Iterator[Quote]:
    if not row.get("InstanceType") or cloud == "gcp":
        return
    region, zone = row.get("Region") or "", row.get("AvailabilityZone") or ""
    for column, price_class, place in (("Price", "on_demand", ""), ("SpotPrice", "spot", zone)):
        try:
            usd = amount(row.get(column) or "")
        except (ValueError, InvalidOperation):
            continue
        market = Market(cloud, region, place, row["InstanceType"], price_class)  # type: ignore[arg-type]
        yield Quote(market, usd, "SkyPilot catalog", as_of)


def _catalog_folder() -> Path | None:
    root = Path(os.environ.get("SKY_RUNTIME_DIR") or Path.home()).expanduser() / ".sky" / "catalogs"
    schemas = [path for path in root.glob("v*") if path.name[1:].isdigit()]
    return max(schemas, key=lambda path: int(path.name[1:]), default=None)


class PriceCache:
    """The last live prices, for when their source cannot be reached. One JSON file, replaced at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> list[Quote]:
        """Quotes as they were last saved; none if there is no file. Raises DataError if it is damaged."""
        if not self.path.is_file():
            return []
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))
            return [
                Quote(
                    Market(*row["market"]),
                    amount(row["usd_per_h"]),
                    f"{row['source']}, last known",
                    row["as_of"],
                )
                for row in rows
            ]
        except (ValueError, TypeError, KeyError, InvalidOperation) as error:
            raise DataError(
                f"{self.path}: not a price cache ({error})", hint="delete it; it is made again"
            ) from None

    def save(self, quotes: Iterable[Quote]) -> None:
        """Keep the newest quote of each market, old and new."""
        kept = {
            quote.market: replace(quote, source=quote.source.removesuffix(", last known"))
            for quote in self.load()
        }
        for quote in quotes:
            if quote.market not in kept or kept[quote.market].as_of <= quote.as_of:
                kept[quote.market] = quote
        rows = [
            {"market": list(q.market), "usd_per_h": str(q.usd_per_h), "source": q.source, "as_of": q.as_of}
            for q in kept.values()
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps(rows, indent=0), encoding="utf-8")
        fresh.replace(self.path)


def _data(name: str) -> str:
    return (resources.files("spotlight.provision") / "data" / name).read_text(encoding="utf-8")
