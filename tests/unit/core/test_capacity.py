"""GPUs and a ratio become whole machines of one region."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.core import capacity
from spotlight.core.capacity import GpuRequest, Offer
from spotlight.errors import CapacityError, UserError


def offers(
    gpu: str = "H100",
    gpus: int = 8,
    usd: str = "55.04",
    spot: tuple[str, ...] = ("17.00", "14.25"),
    region: str = "us-east-1",
    cloud: str = "aws",
) -> list[Offer]:
    """One instance type of a region, on demand and in some spot zones."""
    kind = f"{gpu.lower()}.{gpus}x"
    common = {"gpu": gpu, "gpus": gpus, "cloud": cloud, "region": region, "instance_type": kind}
    found = [Offer(**common, zone="", price_class="on_demand", usd_per_h=Decimal(usd))]
    for i, price in enumerate(spot):
        zone = f"{region}{'abcdef'[i]}"
        found.append(Offer(**common, zone=zone, price_class="spot", usd_per_h=Decimal(price)))
    return found


def plan(gpus: str, ratio: float, have: list[Offer]) -> capacity.Plan:
    return capacity.make_plan(capacity.parse_gpus(gpus), ratio, have)


def shape(found: capacity.Plan) -> list[tuple[str, str, int, int]]:
    return [(row.price_class, row.gpu, row.nodes, row.gpus) for row in found.rows]


def test_three_quarters_of_64_are_48_spot_and_16_on_demand() -> None:
    found = plan("H100:64", 0.75, offers())
    assert shape(found) == [("on_demand", "H100", 2, 8), ("spot", "H100", 6, 8)]
    assert (found.gpus("spot"), found.gpus("on_demand")) == (48, 16)
    assert found.rows[1].zones == ("us-east-1b", "us-east-1a")
    assert found.usd_per_h == 2 * Decimal("55.04") + 6 * Decimal("14.25")
    assert found.ceiling_usd_per_h == found.on_demand_usd_per_h == 8 * Decimal("55.04")


@pytest.mark.parametrize(
    ("gpus", "ratio", "nodes"),
    [
        ("H100:64", 0.0, (8, 0)),
        ("H100:64", 1.0, (1, 7)),  # one node stays
        ("H100:8", 0.75, (1, 0)),
        ("H100:8", 1.0, (1, 0)),
        ("H100:20", 0.75, (1, 2)),  # 24 GPUs: whole nodes
        ("H100:1", 0.5, (1, 0)),
    ],
)
def test_whole_nodes(gpus: str, ratio: float, nodes: tuple[int, int]) -> None:
    found = plan(gpus, ratio, offers())
    assert found.gpus("on_demand") == 8 * nodes[0]
    assert found.gpus("spot") == 8 * nodes[1]


def test_rounding_up_is_said() -> None:
    assert "H100:20 rounded up to whole nodes of 8" in plan("H100:20", 0.75, offers()).rows[0].why
    assert "must not be taken" in plan("H100:64", 1, offers()).rows[0].why


def test_small_machines_are_taken_where_large_ones_miss_the_ratio() -> None:
    have = offers() + offers(gpus=1, usd="6.88", spot=("2.00",))
    assert shape(plan("H100:8", 0.75, have)) == [("on_demand", "H100", 2, 1), ("spot", "H100", 6, 1)]


def test_large_machines_are_taken_at_the_same_price() -> None:
    have = offers(gpus=1, usd="6.88", spot=("1.78125",)) + offers()
    assert shape(plan("H100:64", 0.75, have)) == [("on_demand", "H100", 2, 8), ("spot", "H100", 6, 8)]


def test_two_types_put_the_trainers_on_the_first() -> None:
    have = offers() + offers("A100", 8, "21.96", ("9.00",))
    found = plan("H100:32,A100:32", 0.75, have)
    assert shape(found) == [("on_demand", "H100", 2, 8), ("spot", "H100", 2, 8), ("spot", "A100", 4, 8)]
    assert shape(plan("A100:32,H100:32", 0.25, have)) == [
        ("on_demand", "A100", 4, 8),
        ("on_demand", "H100", 2, 8),
        ("spot", "H100", 2, 8),
    ]


def test_one_region_holds_the_whole_plan_and_the_cheapest_wins() -> None:
    have = offers() + offers(usd="40", spot=("10",), region="us-west-2")
    assert {row.infra for row in plan("H100:64", 0.75, have).rows} == {"aws/us-west-2"}
    split = offers() + offers("A100", region="us-west-2")
    with pytest.raises(CapacityError, match="no region offers H100:8, A100:8"):
        plan("H100:8,A100:8", 0.5, split)


def test_a_region_without_spot_is_second_to_one_with() -> None:
    have = offers(spot=(), usd="30", region="eu-west-1") + offers()
    assert plan("H100:64", 0.75, have).rows[0].region == "us-east-1"
    alone = plan("H100:64", 0.75, offers(spot=()))
    assert shape(alone) == [("on_demand", "H100", 8, 8)]
    assert "no zone sells it as spot" in alone.rows[0].why


def test_no_offer_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="H100:64"):
        plan("H100:64", 0.75, [])


@pytest.mark.parametrize("text", ["H100:64", "A100-80GB:16", "H100:32,A100:32", " L4:1 , T4:2 "])
def test_gpus_are_read(text: str) -> None:
    assert [str(r) for r in capacity.parse_gpus(text)] == [part.strip() for part in text.split(",")]


@pytest.mark.parametrize(
    "text",
    ["", "H100", "H100:", ":8", "H100:0", "H100:-1", "H100:1.5", "H100:8,", "H100:8;id", "H100:٨", "$(id):8",
     "H100:8\n", "H100:99999", "H100:8,h100:8", "../x:1", "H100:16000,A100:16000"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    if text == "H100:8\n":  # blanks around a part are forgiven
        assert capacity.parse_gpus(text) == (GpuRequest("H100", 8),)
        return
    with pytest.raises(UserError):
        capacity.parse_gpus(text)


@pytest.mark.parametrize("ratio", [-0.01, 1.01, math.nan, math.inf])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(UserError, match="spot ratio"):
        capacity.check_ratio(ratio)


@given(
    count=st.integers(1, 300),
    size=st.sampled_from([1, 2, 4, 8, 16]),
    ratio=st.floats(0, 1),
    second=st.integers(0, 100),
)
def test_a_plan_is_never_short_never_a_node_too_many_and_near_the_ratio(
    count: int, size: int, ratio: float, second: int
) -> None:
    asked = f"H100:{count}" + (f",A100:{second}" if second else "")
    found = plan(asked, ratio, offers(gpus=size) + offers("A100", size, "20", ("5",)))
    for gpu, wanted in (("H100", count), ("A100", second)):
        have = sum(row.gpus * row.nodes for row in found.rows if row.gpu == gpu)
        assert wanted <= have < wanted + size
    total = sum(row.gpus * row.nodes for row in found.rows)
    assert found.gpus("on_demand") >= size
    assert abs(found.gpus("spot") - ratio * total) <= size / 2 or found.gpus("on_demand") == size
    assert found.usd_per_h <= found.ceiling_usd_per_h == found.on_demand_usd_per_h
