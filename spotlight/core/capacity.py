"""From `--gpus H100:64 --spot-ratio 0.75` to whole machines of one region, with a reason for each choice.

Two rules stand behind every plan. The head and the trainers need machines that are not taken away, so one node
is always on demand, whatever the ratio. And no private network joins regions or clouds, so a plan has one region.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product

from spotlight.core.cost import PriceClass
from spotlight.errors import CapacityError, UserError

_REQUEST = re.compile(r"([A-Za-z][A-Za-z0-9.-]{0,39}):([1-9][0-9]{0,4})", re.ASCII)
MAX_GPUS = 16_384


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """So many GPUs of one type, as the user asked."""

    gpu: str
    count: int

    def __str__(self) -> str:
        return f"{self.gpu}:{self.count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One kind of machine in one zone (one region, for on-demand: zone "") at one price per hour."""

    gpu: str
    gpus: int
    cloud: str
    region: str
    zone: str
    instance_type: str
    price_class: PriceClass
    usd_per_h: Decimal
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """`nodes` equal machines. `zones` are those they may come from, cheapest first; prices are per machine.

    `usd_per_h` is the cheapest zone's price now, `ceiling_usd_per_h` what the machine may come to cost: spot prices
    move, up to the on-demand price.
    """

    role: str
    price_class: PriceClass
    gpu: str
    gpus: int
    nodes: int
    cloud: str
    region: str
    zones: tuple[str, ...]
    instance_type: str
    usd_per_h: Decimal
    ceiling_usd_per_h: Decimal
    why: str

    @property
    def infra(self) -> str:
        """`cloud/region`, as SkyPilot writes it."""
        return f"{self.cloud}/{self.region}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be rented. `on_demand_usd_per_h`: the same machines without spot, for comparison."""

    rows: tuple[PlanRow, ...]
    on_demand_usd_per_h: Decimal
    source: str

    @property
    def usd_per_h(self) -> Decimal:
        """All machines together, at the prices of now."""
        return sum((row.usd_per_h * row.nodes for row in self.rows), Decimal(0))

    @property
    def ceiling_usd_per_h(self) -> Decimal:
        """The most that all machines together may cost."""
        return sum((row.ceiling_usd_per_h * row.nodes for row in self.rows), Decimal(0))

    def gpus(self, price_class: PriceClass) -> int:
        """GPUs of a price class."""
        return sum(row.gpus * row.nodes for row in self.rows if row.price_class == price_class)


@dataclass(frozen=True, slots=True)
class _Machine:
    """One instance type in one region: its on-demand offer, and its spot offers, cheapest first."""

    on_demand: Offer
    spot: tuple[Offer, ...]

    @property
    def gpus(self) -> int:
        return self.on_demand.gpus


def parse_gpus(text: str) -> tuple[GpuRequest, ...]:
    """`H100:64` or `H100:32,A100-80GB:32`. Raises UserError on anything else, a type named twice included."""
    requests = []
    for part in text.split(","):
        match = _REQUEST.fullmatch(part.strip())
        if match is None:
            raise UserError(f"bad GPUs {part.strip()[:40]!r}", hint="write TYPE:COUNT, e.g. --gpus H100:64")
        requests.append(GpuRequest(match[1], int(match[2])))
    if len({request.gpu.lower() for request in requests}) < len(requests):
        raise UserError(f"a GPU type is named twice in {text[:60]!r}", hint="give each type one count")
    if sum(request.count for request in requests) > MAX_GPUS:
        raise UserError(f"{text[:60]!r} asks for more than {MAX_GPUS} GPUs")
    return tuple(requests)


def check_ratio(spot_ratio: float) -> float:
    """The share of GPUs that may be taken, 0 to 1. Raises UserError."""
    if not 0 <= spot_ratio <= 1:  # NaN fails too
        raise UserError(
            f"bad spot ratio {spot_ratio}", hint="0 (all on demand) to 1 (as much spot as can be)"
        )
    return spot_ratio


def make_plan(requests: Sequence[GpuRequest], spot_ratio: float, offers: Iterable[Offer]) -> Plan:
    """The cheapest plan among the regions that come nearest to what was asked.

    Raises CapacityError when no region offers all the types, in the price classes that are needed.
    """
    check_ratio(spot_ratio)
    offers = list(offers)
    plans = []
    for region in sorted({(offer.cloud, offer.region) for offer in offers}):
        here = [offer for offer in offers if (offer.cloud, offer.region) == region]
        choices = [_machines(request, here) for request in requests]
        plans += [_plan(requests, machines, spot_ratio) for machines in product(*choices)]
    if not plans:
        wanted = ", ".join(map(str, requests))
        raise CapacityError(f"no region offers {wanted}", hint="another --infra, or another GPU type")
    exact = [plan for plan in plans if not spot_ratio or plan.gpus("spot")] or plans
    return min(exact, key=lambda plan: _rank(plan, requests, spot_ratio))


def _machines(request: GpuRequest, offers: Sequence[Offer]) -> list[_Machine]:
    """Instance types with that GPU; a type without a price on demand cannot hold the head or be compared."""
    found = []
    for offer in offers:
        if offer.price_class != "on_demand" or offer.gpu.lower() != request.gpu.lower():
            continue
        spot = [o for o in offers if o.price_class == "spot" and o.instance_type == offer.instance_type]
        found.append(_Machine(offer, tuple(sorted(spot, key=lambda o: (o.usd_per_h, o.zone)))))
    return found


def _rank(plan: Plan, requests: Sequence[GpuRequest], spot_ratio: float) -> tuple[object, ...]:
    """Nearest to the GPUs asked for, then to the ratio, then cheapest, then in the largest machines."""
    total = sum(request.count for request in requests)
    have = sum(row.gpus * row.nodes for row in plan.rows)
    off_ratio = abs(plan.gpus("spot") - spot_ratio * total)
    return have - total, off_ratio, plan.usd_per_h, -max(row.gpus for row in plan.rows)


def _plan(requests: Sequence[GpuRequest], machines: Sequence[_Machine], spot_ratio: float) -> Plan:
    nodes = [math.ceil(request.count / m.gpus) for request, m in zip(requests, machines, strict=True)]
    on_demand = _on_demand_nodes(nodes, machines, spot_ratio)
    rows: list[PlanRow] = []
    for i, (request, machine) in enumerate(zip(requests, machines, strict=True)):
        if on_demand[i]:
            why = _why_on_demand(request, machine, nodes[i], first=i == 0, spot_ratio=spot_ratio)
            rows.append(_row(machine, on_demand[i], "on_demand", "trainer", why))
        if spot := nodes[i] - on_demand[i]:
            zones = f"cheapest of {len(machine.spot)} zones, {_saved(machine)} below on-demand"
            rows.append(_row(machine, spot, "spot", "explorer", zones))
    everything = sum((m.on_demand.usd_per_h * n for m, n in zip(machines, nodes, strict=True)), Decimal(0))
    sources = [machines[0].on_demand.source]
    sources += [m.spot[0].source for m, n, kept in zip(machines, nodes, on_demand, strict=True) if n > kept]
    return Plan(tuple(rows), everything, ", ".join(dict.fromkeys(sources)))


def _on_demand_nodes(nodes: Sequence[int], machines: Sequence[_Machine], spot_ratio: float) -> list[int]:
    """How many nodes of each type are on demand: first those of the type named first, at least one of it.

    Types without any spot offer are on demand altogether.
    """
    total = sum(n * m.gpus for n, m in zip(nodes, machines, strict=True))
    wanted = total * (1 - spot_ratio)
    chosen = [0 if machine.spot else n for n, machine in zip(nodes, machines, strict=True)]
    chosen[0] = max(chosen[0], 1)
    for i, machine in enumerate(machines):
        have = sum(n * m.gpus for n, m in zip(chosen, machines, strict=True))
        missing = math.floor((wanted - have) / machine.gpus + 0.5)
        chosen[i] += min(max(missing, 0), nodes[i] - chosen[i])
    return chosen


def _row(machine: _Machine, nodes: int, price_class: PriceClass, role: str, why: str) -> PlanRow:
    full = machine.on_demand
    cheapest = machine.spot[0] if price_class == "spot" else full
    return PlanRow(
        role=role,
        price_class=price_class,
        gpu=full.gpu,
        gpus=full.gpus,
        nodes=nodes,
        cloud=full.cloud,
        region=full.region,
        zones=tuple(offer.zone for offer in machine.spot) if price_class == "spot" else (),
        instance_type=full.instance_type,
        usd_per_h=cheapest.usd_per_h,
        ceiling_usd_per_h=full.usd_per_h,
        why=why,
    )


def _why_on_demand(
    request: GpuRequest, machine: _Machine, nodes: int, *, first: bool, spot_ratio: float
) -> str:
    reasons = ["head and trainers" if first else "rolls out"]
    if not machine.spot and spot_ratio:
        reasons.append("no zone sells it as spot")
    elif first and spot_ratio == 1:
        reasons.append("one node must not be taken away")
    if nodes * machine.gpus != request.count:
        reasons.append(f"{request} rounded up to whole nodes of {machine.gpus}")
    return "; ".join(reasons)


def _saved(machine: _Machine) -> str:
    return f"{1 - machine.spot[0].usd_per_h / machine.on_demand.usd_per_h:.0%}"
