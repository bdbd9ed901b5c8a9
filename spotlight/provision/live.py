"""Spot prices as EC2 itself says they are and were: asked, screened, and kept for when it cannot be asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from spotlight.core.capacity import GpuRequest, Offer, Plan, make_plan
from spotlight.core.cost import Market, PricePoint
from spotlight.core.ledger import Ledger
from spotlight.errors import SpotlightError
from spotlight.provision.prices import PriceCache, Quote, screen

Connect = Callable[[str], Any]
log = logging.getLogger(__name__)


def plan_at_prices_of_now(
    requests: Sequence[GpuRequest],
    spot_ratio: float,
    offers: Sequence[Offer],
    cache: PriceCache,
    now_s: float,
    connect: Connect | None = None,
) -> Plan:
    """The best plan, at EC2's spot prices of now wherever it stands on EC2; places are asked about as they come up.

    Where EC2 cannot be asked its last known prices are taken, else the catalog's. `connect` makes a client for a
    region. Raises CapacityError, and DataError for a damaged cache.
    """
    asked: set[tuple[str, str]] = set()
    while True:
        plan = make_plan(requests, spot_ratio, offers)
        rows = (row for row in plan.rows if row.cloud == "aws" and row.price_class == "spot")
        places = {(row.region, row.instance_type) for row in rows} - asked
        if not places:
            return plan
        asked |= places
        quotes = [quote for place in sorted(places) for quote in _quotes(*place, cache, now_s, connect)]
        offers = _repriced(offers, quotes)


def in_force(ledger: Ledger, now_s: float, connect: Connect | None = None) -> list[PricePoint]:
    """Every believable spot price of EC2 while the ledger's machines lived, in time order within each market.

    Raises CredentialError or PreconditionError.
    """
    from spotlight.provision import aws

    spans: dict[Market, tuple[float, float]] = {}
    for item in ledger.intervals:
        if item.cloud == "aws" and item.price_class == "spot" and item.zone and item.up_s is not None:
            end_s = now_s if item.ended_s is None else item.ended_s
            start_s, last_s = spans.get(item.market(), (item.up_s, end_s))
            spans[item.market()] = min(start_s, item.up_s), max(last_s, end_s)
    clients = {region: (connect or aws.client)(region) for region in {market.region for market in spans}}
    points = [
        point
        for market, span in spans.items()
        for point in aws.spot_series(clients[market.region], market.instance_type, market.zone, *span)
    ]
    full = [
        _quote(known[-1])
        for market in {market._replace(zone="", price_class="on_demand") for market in spans}
        if (known := ledger.series(market))
    ]
    believed = screen([*full, *map(_quote, points)])[len(full) :]
    return [point for point, quote in zip(points, believed, strict=True) if not quote.problem]


def at_prices_in_force(ledger: Ledger, points: Iterable[PricePoint]) -> Ledger:
    """The ledger with these prices instead of what it had for their markets."""
    found: dict[Market, list[PricePoint]] = {}
    for point in points:
        found.setdefault(point.market, []).append(point)
    return replace(ledger, prices={**ledger.prices, **{m: tuple(p) for m, p in found.items()}})


def keep(points: Iterable[PricePoint], cache: PriceCache) -> None:
    """Remember the newest price of each market."""
    newest = {point.market: point for point in sorted(points, key=lambda point: point.at_s)}
    cache.save(map(_quote, newest.values()))


def _quotes(
    region: str, instance_type: str, cache: PriceCache, now_s: float, connect: Connect | None
) -> Iterator[Quote]:
    from spotlight.provision import aws

    try:
        quotes = aws.spot_quotes((connect or aws.client)(region), instance_type, now_s)
    except SpotlightError as error:
        log.warning("live prices of %s in %s: %s", instance_type, region, error.message)
        known = cache.load()
        yield from (q for q in known if (q.market.region, q.market.instance_type) == (region, instance_type))
        return
    cache.save(quotes)
    yield from quotes


def _repriced(offers: Sequence[Offer], quotes: Iterable[Quote]) -> list[Offer]:
    on_demand = (
        Quote(_market(offer), offer.usd_per_h, offer.source, "")
        for offer in offers
        if offer.price_class != "spot"
    )
    known = {quote.market: quote for quote in screen([*on_demand, *quotes]) if not quote.problem}
    return [
        replace(offer, usd_per_h=quote.usd_per_h, source=f"{quote.source} of {quote.as_of}")
        if offer.price_class == "spot" and (quote := known.get(_market(offer)))
        else offer
        for offer in offers
    ]


def _market(offer: Offer) -> Market:
    return Market(offer.cloud, offer.region, offer.zone, offer.instance_type, offer.price_class)


def _quote(point: PricePoint) -> Quote:
    return Quote(point.market, point.usd_per_h, point.source, point.as_of)
