"""What Spotlight asks of a place that has machines: three verbs, whatever the cloud.

A provider knows machines only. What runs on them (Ray, explorers, trainers) is the runtime's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Role(StrEnum):
    """The price class of a node and, with it, what may stand on it."""

    ON_DEMAND = "on_demand"  # head, trainers, the coordinator: nothing here may be lost
    SPOT = "spot"  # explorers: everything here may be lost


class NodeState(StrEnum):
    """What the provider's own list says of a machine."""

    STARTING = "starting"
    UP = "up"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A machine to have. `name` is unique within the run and outlives the machine behind it."""

    name: str
    role: Role
    gpus: int = 1
    head: bool = False
    zones: tuple[str, ...] = ()
    """Where it may stand, best first; empty: wherever the provider likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A machine as its provider sees it. `instance` changes with every launch of the same name."""

    name: str
    role: Role
    instance: str
    state: NodeState
    reason: str = ""
    zone: str = ""
    interrupted: bool = False
    """Gone because its provider took it, not because it was ended or broke."""


class Provider(Protocol):
    """A source of machines for one run.

    Contract: `launch` is idempotent by name and returns once the provider has said yes or no, which may take it
    minutes; `list` tells the truth of the provider, not of our memory; `terminate` of what is gone is no error,
    and when it returns the provider's list shows the machine as gone.
    """

    def launch(self, spec: NodeSpec) -> None:
        """Ask for a machine. Raises CapacityError, QuotaError or CredentialError."""

    def list(self) -> list[NodeInfo]:
        """All machines of this run that were ever asked for, the gone ones with their reason."""

    def terminate(self, name: str) -> None:
        """End a machine and everything on it, now."""


def spot_names(num_spot: int) -> list[str]:
    """The names of a run's spot nodes: s0, s1, ..."""
    return [f"s{i}" for i in range(num_spot)]
