"""Short forms of ledgers for the tests of money: a node in one line becomes the records of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spotlight.core import cost
from spotlight.core.ledger import Ledger, ledger_from_records
from spotlight.provision.prices import load_rules

RULES = load_rules()
HERE = Path(__file__).parent


def node_records(node: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """The journal records of one node; defaults: aws spot p5.48xlarge with 8 GPUs, ended by us."""
    name, launch = node.get("node", f"n{index}"), node.get("launch", 0)
    kind, price_class = node.get("type", "p5.48xlarge"), node.get("class", "spot")
    at = {"node": name, "launch": launch}
    where = {
        "cloud": node.get("cloud", "aws"),
        "region": node.get("region", "us-east-1"),
        "zone": node.get("zone", "a"),
    }
    market = {**where, "instance_type": kind}
    asked = {"gpus": node.get("gpus", 8), "price_class": price_class, "role": node.get("role", "explorer")}
    asked |= {"at_s": node.get("requested") or node.get("up"), "disk_gb": str(node.get("disk_gb", 0))}
    records = [{"kind": "requested", **at, **market, **asked}]
    if "up" in node:
        records.append({"kind": "up", **at, "at_s": node["up"], **_mono(node, "up_mono")})
    if "ready" in node:
        records.append({"kind": "ready", **at, "at_s": node["ready"]})
    if "ended" in node:
        why = {"reason": node.get("reason", "user"), "source": node.get("source", "own")}
        why |= {"keeps_disk": node.get("keeps_disk", False), **_mono(node, "ended_mono")}
        records.append({"kind": "ended", **at, "at_s": node["ended"], **why})
    if "disk_ended" in node:
        records.append({"kind": "disk_ended", **at, "at_s": node["disk_ended"]})
    for start, usd in node.get("prices", [["always", "15"]]):
        point = {} if start == "always" else {"at_s": start}
        records.append(_price(market, price_class, usd) | point)
    if "on_demand" in node:
        records.append(_price({**market, "zone": ""}, "on_demand", node["on_demand"]))
    return [{"type": "node", **record} for record in records]


def ledger(*nodes: dict[str, Any], more: list[dict[str, Any]] = [], repeat: int = 1) -> Ledger:  # noqa: B006
    """A ledger of nodes in short form, read the way a journal is read."""
    records = [record for i, node in enumerate(nodes) for record in node_records(node, i)]
    records += [{"type": "node", **record} for record in more]
    return ledger_from_records(records * repeat)


def utc(text: str) -> float:
    return cost.utc_seconds(text)


def _mono(node: dict[str, Any], field: str) -> dict[str, Any]:
    return {"mono_s": node[field], "clock": "head-1"} if field in node else {}


def _price(market: dict[str, Any], price_class: str, usd: str) -> dict[str, Any]:
    return {"kind": "price", **market, "price_class": price_class, "usd_per_h": usd, "source": "test"}
