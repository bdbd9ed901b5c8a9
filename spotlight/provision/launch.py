"""What a cloud run was launched with: written into its folder before anything is created, and sent to its head."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from spotlight.core.capacity import PlanRow
from spotlight.core.cost import Market
from spotlight.errors import DataError, NotFoundError, UserError
from spotlight.names import run_name
from spotlight.provision.base import NodeSpec, Role

FILE = "launch.json"
IDLE_MINUTES = 10  # a cluster whose job has ended goes this long before it ends itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One run's machines. `store` is the bucket prefix they share, `image` a machine image or empty."""

    run: str
    store: str
    rows: tuple[PlanRow, ...]
    image: str = ""

    @property
    def cloud(self) -> str:
        """All of a run is in one cloud and region."""
        return self.rows[0].cloud

    @property
    def region(self) -> str:
        """The region."""
        return self.rows[0].region

    def check(self) -> Launch:
        """Raises UserError for what cannot be launched: one cluster, so one type, holds the on-demand part."""
        kinds = [row.gpu for row in self.rows if row.price_class == "on_demand"]
        if len(kinds) != 1:
            raise UserError(
                f"the on-demand part would be of {' and '.join(kinds)}, and its machines must be alike",
                hint="name first a type with enough GPUs for it, or raise --spot-ratio",
            )
        return self

    def nodes(self) -> dict[str, PlanRow]:
        """Every node by name: od0, od1, ... and s0, s1, ..."""
        found: dict[str, PlanRow] = {}
        for prefix, price_class in (("od", "on_demand"), ("s", "spot")):
            rows = [row for row in self.rows if row.price_class == price_class for _ in range(row.nodes)]
            found |= {f"{prefix}{i}": row for i, row in enumerate(rows)}
        return found

    def specs(self, role: Role) -> list[NodeSpec]:
        """The nodes of a price class as machines to have."""
        return [
            NodeSpec(name=name, role=role, gpus=row.gpus, head=name == "od0", zones=row.zones)
            for name, row in self.nodes().items()
            if row.price_class == role.value
        ]

    def market(self, node: str) -> tuple[Market, int]:
        """What a node is billed as, and its GPUs."""
        row = self.nodes()[node]
        zone = row.zones[0] if row.zones else ""
        return Market(row.cloud, row.region, zone, row.instance_type, row.price_class), row.gpus

    def save(self, folder: Path) -> None:
        """Write it into a run's folder, whole or not at all."""
        draft = folder / f"{FILE}.partial"
        draft.write_text(json.dumps(dataclasses.asdict(self), indent=1, default=str) + "\n")
        draft.replace(folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Launch:
        """Read it back. Raises NotFoundError for a run that was never launched, DataError for a broken file."""
        try:
            tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise NotFoundError(f"run {folder.name!r} is not in a cloud", hint="spotlight status") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / FILE}: {error}") from None
        try:
            rows = tuple(_row(row) for row in tree.pop("rows"))
            run_name(tree["run"])
            return cls(**tree, rows=rows)
        except (KeyError, TypeError, AttributeError, InvalidOperation) as error:
            raise DataError(f"{folder / FILE}: not a launch ({error})") from None


def _row(tree: Mapping[str, Any]) -> PlanRow:
    prices = {name: Decimal(tree[name]) for name in ("usd_per_h", "ceiling_usd_per_h")}
    return PlanRow(**{**tree, **prices, "zones": tuple(tree["zones"])})
