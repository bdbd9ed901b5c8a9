"""Why a machine ended, asked of the cloud after the fact. What it says decides what is billed.

One protocol, one implementation per cloud (`aws.Ec2Ends`, `gcp.GceEnds`), one contract test for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spotlight.core.cost import EndReason, NodeEnded
from spotlight.errors import UserError


@dataclass(frozen=True, slots=True)
class CloudEnd:
    """The end of a machine in the cloud's own words.

    `at_s`: UTC seconds, None if the cloud does not say. `source`: cloud and code. `keeps_disk`: the disk is
    still there, and billed.
    """

    reason: EndReason
    source: str
    at_s: float | None = None
    keeps_disk: bool = False

    def record(self, node: str, launch: int, seen_s: float) -> NodeEnded:
        """The journal record of this end; `seen_s` (UTC seconds) stands in where the cloud gives no time."""
        at_s = seen_s if self.at_s is None else self.at_s
        return NodeEnded(
            node=node,
            launch=launch,
            at_s=at_s,
            reason=self.reason,
            source=self.source,
            keeps_disk=self.keeps_disk,
        )


class EndSource(Protocol):
    """A cloud that can be asked.

    Contract: a machine that runs, or starts, has no end (None). One that the cloud took has reason
    "interrupted". One that was ended over the API or from inside has "user", or "stopped" if it can start
    again. One that the cloud does not know (any more) has "unknown", never an exception: clouds forget the
    dead within hours.
    """

    def end_of(self, instance: str) -> CloudEnd | None:
        """The end of `instance`, or None while it lives.

        Raises CredentialError if the cloud refuses us, PreconditionError if it cannot be reached.
        """


def end_source(cloud: str, region: str) -> EndSource:
    """The source of one region. Raises UserError for a cloud that cannot be asked."""
    if cloud == "aws":
        from spotlight.provision import aws

        return aws.Ec2Ends(aws.client(region))
    if cloud == "gcp":
        from spotlight.provision import gcp

        return gcp.GceEnds(gcp.default_project())
    raise UserError(f"no support for the cloud {cloud[:40]!r}", hint="--infra aws/REGION or gcp/REGION")
