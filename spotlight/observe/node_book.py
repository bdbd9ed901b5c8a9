"""Writes what happens to machines into the journal, as it happens; `core.ledger` reads it back.

The writer counts launches of a name and stamps both clocks; those who start and lose machines need not.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from spotlight.core import cost
from spotlight.core.cost import EndReason, Market, PricePoint, Record
from spotlight.core.ledger import Ledger, NodeKey


class NodeBook:
    """One per process that starts machines. `append` takes a JSON-able record, as `Journal.append` does.

    `known`: the ledger so far when a run is resumed, so that launches are numbered on.
    """

    def __init__(
        self,
        append: Callable[[Mapping[str, Any]], Any],
        *,
        known: Ledger | None = None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._append, self._wall, self._monotonic = append, wall, monotonic
        self._clock = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._launches: dict[str, int] = {}
        self._priced: set[PricePoint] = set()
        for item in known.intervals if known else ():
            self._launches[item.key.node] = max(item.key.launch, self._launches.get(item.key.node, 0))

    def requested(
        self, node: str, market: Market, *, gpus: int, role: str, disk_gb: Decimal = Decimal(0)
    ) -> NodeKey:
        """A machine was asked for under this name: a new launch of it."""
        key = NodeKey(node, self._launches.get(node, -1) + 1)
        self._launches[node] = key.launch
        self._write(
            cost.NodeRequested(**self._head(key), **market._asdict(), gpus=gpus, role=role, disk_gb=disk_gb)
        )
        return key

    def up(self, node: str, *, region: str = "", zone: str = "", instance_id: str = "") -> None:
        """The machine exists, in the zone that was got."""
        self._write(cost.NodeUp(**self._now(node), region=region, zone=zone, instance_id=instance_id))

    def ready(self, node: str) -> None:
        """The machine takes work."""
        self._write(cost.NodeReady(**self._now(node)))

    def notice(self, node: str) -> None:
        """The cloud announced that it takes the machine back."""
        self._write(cost.NodeNotice(**self._now(node)))

    def ended(self, node: str, reason: EndReason, *, keeps_disk: bool = False) -> None:
        """The machine is gone, as far as we see. What the cloud says of it later goes through `record`."""
        self._write(cost.NodeEnded(**self._now(node), reason=reason, keeps_disk=keeps_disk))

    def price(self, point: PricePoint) -> None:
        """A price holds; the same one twice is written once."""
        if point not in self._priced:
            self._priced.add(point)
            self._write(point)

    def record(self, record: Record) -> None:
        """Any other record, as it is: a cloud's word on an end, egress, a bill."""
        self._write(record)

    def launch_of(self, node: str) -> int:
        """The number of the newest launch of a name. Raises KeyError for a name never asked for."""
        return self._launches[node]

    def _now(self, node: str) -> dict[str, Any]:
        return self._head(NodeKey(node, self._launches[node]))

    def _head(self, key: NodeKey) -> dict[str, Any]:
        return {
            "node": key.node,
            "launch": key.launch,
            "at_s": self._wall(),
            "mono_s": self._monotonic(),
            "clock": self._clock,
        }

    def _write(self, record: Record) -> None:
        self._append(cost.encode(record))
