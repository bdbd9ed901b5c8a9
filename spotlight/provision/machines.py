"""The cloud's own list of a run's machines, by tag: the truth that `down` and the reconciler go by.

One protocol, one implementation per cloud, no trust in SkyPilot's or our own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spotlight.errors import UserError
from spotlight.provision.base import NodeState

RUN_TAG, NODE_TAG = "spotlight-run", "spotlight-node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance. `node` is its tag; `interrupted`: the cloud took it."""

    instance: str
    node: str
    zone: str
    spot: bool
    state: NodeState
    launched_s: float
    reason: str = ""
    interrupted: bool = False


class MachineList(Protocol):
    """Contract: `of_run` shows what lives and, for as long as the cloud remembers, what has ended; `terminate`
    of what is gone is no error. Both raise CredentialError or PreconditionError.
    """

    def of_run(self, run: str) -> list[Machine]:
        """All machines that carry the run's tag."""

    def runs(self) -> set[str]:
        """Every run that has a living machine."""

    def terminate(self, instances: list[str]) -> None:
        """End machines for good; returns when the cloud has taken the order."""


def machine_list(cloud: str, region: str) -> MachineList:
    """The list of one region. Raises UserError for a cloud that we have no list of: such a run could not be ended."""
    if cloud == "aws":
        from spotlight.provision import aws

        return aws.Ec2Machines(aws.client(region))
    if cloud == "gcp":
        from spotlight.provision import gcp

        return gcp.GceMachines(gcp.default_project(), region)
    raise UserError(f"no support for the cloud {cloud[:40]!r}", hint="--infra aws/REGION or gcp/REGION")
