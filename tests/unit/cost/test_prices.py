"""Prices: the errors that catalogs are known for are seen, substitutes say so, nothing unknown becomes 0."""

from __future__ import annotations

from decimal import Decimal

import pytest

from spotlight.core.cost import Market
from spotlight.errors import DataError
from spotlight.provision import prices
from spotlight.provision.prices import PriceBook, PriceCache, Quote, screen


def quote(
    usd, price_class="spot", region="us-east-1", zone="z1", as_of="2026-07-20", source="catalog", cloud="aws"
):
    zone = "" if price_class == "on_demand" else zone
    return Quote(Market(cloud, region, zone, "p5.48xlarge", price_class), Decimal(usd), source, as_of)


def problems(*quotes):
    return [q.problem for q in screen(quotes)]


OD = quote("55.04", "on_demand")


@pytest.mark.parametrize(
    ("usd", "why"),
    [
        ("55.04", "not below the on-demand"),  # spot at the on-demand price: no market
        ("71.552", "not below the on-demand"),  # dearer than on demand
        ("5.504", "exactly a tenth"),
        ("5.504000", "exactly a tenth"),
        ("0", "not above 0"),
        ("0.00001", "below 9%"),
    ],
)
def test_known_catalog_errors_are_marked(usd, why):
    assert why in problems(OD, quote(usd))[1]


@pytest.mark.parametrize("usd", ["14.246", "5.503", "5.505", "55.03"])
def test_plausible_prices_pass(usd):
    assert problems(OD, quote(usd)) == ["", ""]


def test_an_outlier_is_marked_and_the_others_are_not():
    """us-east-1 had $14.25 to $47.21 by zone; the estimate must not swing by 3x with the zone."""
    usual = [quote(usd, zone=f"z{i}") for i, usd in enumerate(["14.58", "14.25", "14.87", "21.62", "21.71"])]
    marked = problems(OD, *usual, quote("47.2054", zone="bad"))
    assert marked[-1] == "more than 2x off the median of $18.245"
    assert marked[:-1] == [""] * 6


def test_a_leaked_on_demand_price_is_an_outlier_even_if_most_zones_repeat_it():
    """us-central1 and us-west1 listed the H100:8 host at 43.07 in all their zones, elsewhere it is 88-112."""
    leaked = [
        quote("43.06615", "on_demand", region, cloud="gcp") for region in ("us-central1", "us-west1")
    ] * 3
    true = [
        quote(usd, "on_demand", region, cloud="gcp")
        for region, usd in (("us-east4", "87.83"), ("us-east5", "98.93"), ("europe-west4", "111.82"))
    ]
    assert [bool(problem) for problem in problems(*leaked, *true)] == [True] * 6 + [False] * 3


def test_two_quotes_are_too_few_for_a_median():
    assert problems(quote("10", zone="a"), quote("40", zone="b")) == ["", ""]


def test_a_price_over_on_demand_elsewhere_is_no_error():
    """Spot is compared with the on-demand price of its own region only."""
    assert problems(OD, quote("60", region="ap-southeast-2")) == ["", ""]


MARKET = Market("aws", "us-east-1", "z1", "p5.48xlarge", "spot")


def test_the_exact_zone_wins_then_the_newest():
    book = PriceBook(
        [OD, quote("15", as_of="2026-01-01"), quote("16", as_of="2026-08-01"), quote("20", zone="z2")]
    )
    assert book.find(MARKET).usd_per_h == 16


def test_substitutes_are_dear_and_named():
    book = PriceBook([OD, quote("15", zone="z2"), quote("18", zone="z3")])
    found = book.find(MARKET)
    assert (found.usd_per_h, found.market) == (18, MARKET)
    assert "dearest zone of us-east-1 (z3)" in found.source

    found = PriceBook([OD]).find(MARKET)
    assert found.usd_per_h == Decimal("55.04")
    assert "on-demand price as ceiling" in found.source


def test_a_rejected_zone_falls_back_and_is_kept_for_the_report():
    book = PriceBook([OD, quote("55.04"), quote("15", zone="z2")])
    assert book.find(MARKET).usd_per_h == 15
    assert [rejected.market.zone for rejected in book.rejected] == ["z1"]


def test_unknown_is_none_never_zero():
    assert PriceBook([]).find(MARKET) is None
    assert PriceBook([quote("0")]).find(MARKET) is None
    assert PriceBook([quote("15")]).find(MARKET._replace(price_class="on_demand")) is None


def test_a_quote_becomes_a_price_record_with_source_and_date():
    point = quote("15").point(at_s=100.0)
    assert (point.market, point.at_s, point.usd_per_h) == (MARKET, 100.0, 15)
    assert (point.source, point.as_of) == ("catalog", "2026-07-20")


# --- sources


def test_the_packaged_table_is_believable_and_dated():
    quotes = prices.packaged_quotes()
    book = PriceBook(quotes)
    assert len(quotes) >= 25
    assert book.rejected == []
    assert all(q.as_of and q.source for q in quotes)
    known = {(q.market.cloud, q.market.region, q.market.instance_type) for q in quotes}
    for cloud, region, kind in known:  # each machine can be compared with on demand
        assert book.find(Market(cloud, region, "", kind, "on_demand")) is not None


def test_every_rule_has_a_source():
    rules = prices.load_rules()
    assert {"aws", "gcp", "azure", "local"} <= rules.keys()
    assert all(rule.source for rule in rules.values())
    assert (rules["aws"].minimum_s, rules["aws"].free_if_interrupted_within_s) == (60, 3600)


def test_the_catalog_of_skypilot_is_read_by_zone(tmp_path, monkeypatch):
    for schema, usd in (("v8", "15.0"), ("v10", "14.0")):
        folder = tmp_path / ".sky" / "catalogs" / schema / "aws"
        folder.mkdir(parents=True)
        (folder / "vms.csv").write_text(
            "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region,AvailabilityZone\n"
            f"p5.48xlarge,H100,8.0,55.04,{usd},us-east-1,z1\n"
            "p5.48xlarge,H100,8.0,55.04,,us-east-1,z2\n"  # no spot price is not a price of 0
            "p5.48xlarge,H100,8.0,nan,-3,us-east-1,z3\n"
            ",H100,8.0,1,1,us-east-1,z4\n"
        )
    gcp = tmp_path / ".sky" / "catalogs" / "v10" / "gcp"
    gcp.mkdir()
    (gcp / "vms.csv").write_text(
        "InstanceType,Price,SpotPrice,Region,AvailabilityZone\na3,9.46,3.68,us,us-a\n"
    )
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    found = list(prices.catalog_quotes())
    assert [(q.market.zone, q.market.price_class, q.usd_per_h) for q in found] == [
        ("", "on_demand", Decimal("55.04")),
        ("z1", "spot", Decimal("14.0")),  # v10 is newer than v8
        ("", "on_demand", Decimal("55.04")),
    ]
    assert {q.source for q in found} == {"SkyPilot catalog"}


def test_without_a_catalog_there_are_no_quotes(tmp_path, monkeypatch):
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    assert list(prices.catalog_quotes()) == []


def test_the_last_known_price_says_that_it_is_one_and_keeps_its_date(tmp_path):
    cache = PriceCache(tmp_path / "prices.json")
    assert cache.load() == []
    cache.save([quote("15", as_of="2026-07-20", source="EC2 spot price history")])
    cache.save([quote("14", as_of="2026-07-19", source="EC2 spot price history"), quote("20", zone="z2")])
    old, new = cache.load()
    assert (old.usd_per_h, old.as_of, old.source) == (15, "2026-07-20", "EC2 spot price history, last known")
    assert new.market.zone == "z2"
    cache.save([])
    assert cache.load()[0].source == "EC2 spot price history, last known"


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '[{"market": []}]', '[{"market": ["a"], "usd_per_h": "x"}]']
)
def test_a_damaged_cache_is_named(tmp_path, text):
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"prices\.json: not a price cache"):
        PriceCache(path).load()
