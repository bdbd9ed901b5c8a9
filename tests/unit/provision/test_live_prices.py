"""Plans and bills at EC2's own prices: asked where they matter, screened, kept, and dated when they are old."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from spotlight.core.capacity import Offer, Plan, parse_gpus
from spotlight.core.cost import Market, NodeRequested, NodeUp, PricePoint, encode
from spotlight.core.ledger import ledger_from_records
from spotlight.errors import PreconditionError
from spotlight.provision import live
from spotlight.provision.prices import PriceCache

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)
REQUESTS = parse_gpus("H100:16")


class Ec2:
    """The price history of one region: {zone: [(hour, $)]}."""

    def __init__(self, region: str, prices: dict[str, list[tuple[int, str]]]) -> None:
        self.meta = SimpleNamespace(region_name=region)
        self._prices = prices

    def get_paginator(self, _: str) -> Ec2:
        return self

    def paginate(self, **asked: Any) -> list[dict[str, Any]]:
        zones = [zone for item in asked["Filters"] for zone in item["Values"]]
        rows = [
            {"AvailabilityZone": zone, "SpotPrice": usd, "Timestamp": NOON.replace(hour=hour)}
            for zone, points in self._prices.items()
            if not zones or zone in zones
            for hour, usd in points
        ]
        return [{"SpotPriceHistory": rows}]


class Account:
    """`prices` by region; a region that is not there cannot be reached."""

    def __init__(self, **prices: dict[str, list[tuple[int, str]]]) -> None:
        self.prices = prices
        self.asked: list[str] = []

    def __call__(self, region: str) -> Ec2:
        self.asked.append(region)
        if region not in self.prices:
            raise PreconditionError("EC2 cannot be reached")
        return Ec2(region, self.prices[region])


def offers(**spot: float) -> list[Offer]:
    """Machines of 8 at $50, and their catalog spot price, by region ("east" has zones east-a and east-b)."""
    found = []
    for region, usd in spot.items():
        for zone in ("", f"{region}-a", f"{region}-b"):
            found.append(
                Offer(
                    gpu="H100", gpus=8, cloud="aws", region=region, zone=zone, instance_type="p5.48xlarge",
                    price_class="spot" if zone else "on_demand", usd_per_h=Decimal(str(usd if zone else 50)),
                    source="SkyPilot catalog",
                )
            )  # fmt: skip
    return found


def plan(account: Account, cache: PriceCache, **spot: float) -> Plan:
    return live.plan_at_prices_of_now(REQUESTS, 0.5, offers(**spot), cache, NOON.timestamp(), account)


@pytest.fixture
def cache(tmp_path) -> PriceCache:
    return PriceCache(tmp_path / "prices.json")


def spot_row(plan: Plan) -> Any:
    return next(row for row in plan.rows if row.price_class == "spot")


def test_a_plan_has_the_prices_of_now_and_says_whose_they_are(cache: PriceCache) -> None:
    account = Account(east={"east-a": [(3, "15"), (11, "20")], "east-b": [(9, "18")]})
    found = plan(account, cache, east=12, west=40)
    row = spot_row(found)
    assert (row.usd_per_h, row.zones) == (18, ("east-b", "east-a"))
    assert found.source == "SkyPilot catalog, EC2 spot price history of 2026-03-02"
    assert account.asked == ["east"]


def test_a_region_that_turns_out_dearer_gives_way_to_the_next(cache: PriceCache) -> None:
    account = Account(east={"east-a": [(3, "45")], "east-b": [(3, "45")]}, west={"west-a": [(3, "16")]})
    found = plan(account, cache, east=12, west=20)
    assert (spot_row(found).region, spot_row(found).usd_per_h) == ("west", 16)
    assert account.asked == ["east", "west"]


def test_without_an_answer_the_last_known_price_is_taken_with_its_date(cache: PriceCache) -> None:
    plan(Account(east={"east-a": [(3, "15")]}), cache, east=12)
    row = spot_row(plan(Account(), cache, east=12))
    assert row.zones[1] == "east-a"
    found = plan(Account(), cache, east=20)
    assert spot_row(found).usd_per_h == 15
    assert found.source.endswith("EC2 spot price history, last known of 2026-03-02")


def test_without_an_answer_and_without_a_memory_the_catalog_s_price_stands(cache: PriceCache) -> None:
    found = plan(Account(), cache, east=12)
    assert (spot_row(found).usd_per_h, found.source) == (12, "SkyPilot catalog")


def test_a_price_that_cannot_be_true_is_not_taken(cache: PriceCache) -> None:
    found = plan(Account(east={"east-a": [(3, "0.00001")], "east-b": [(3, "51")]}), cache, east=12)
    assert (spot_row(found).usd_per_h, found.source) == (12, "SkyPilot catalog")


def test_no_spot_machine_no_question(cache: PriceCache) -> None:
    account = Account()
    live.plan_at_prices_of_now(REQUESTS, 0.0, offers(east=12), cache, NOON.timestamp(), account)
    assert account.asked == []


def test_prices_in_force_are_believed_kept_and_used(cache: PriceCache) -> None:
    market = Market("aws", "east", "east-a", "p5.48xlarge", "spot")
    full = PricePoint(
        **market._replace(zone="", price_class="on_demand")._asdict(), usd_per_h=Decimal(50), source="x"
    )
    guess = PricePoint(**market._asdict(), usd_per_h=Decimal(9), source="guess")
    began_s = NOON.replace(hour=10).timestamp()
    node = NodeRequested(node="s0", at_s=began_s, gpus=8, **market._asdict())
    records = [full, guess, node, NodeUp(node="s0", at_s=began_s)]
    ledger = ledger_from_records([encode(record) for record in records])
    account = Account(east={"east-a": [(4, "15"), (9, "0.00001"), (11, "17")]})
    points = live.in_force(ledger, NOON.timestamp(), account)
    assert [point.usd_per_h for point in points] == [15, 17]
    assert live.at_prices_in_force(ledger, points).series(market) == tuple(points)
    live.keep(points, cache)
    (kept,) = cache.load()
    assert (kept.usd_per_h, kept.as_of, kept.source) == (
        17,
        "2026-03-02",
        "EC2 spot price history, last known",
    )
