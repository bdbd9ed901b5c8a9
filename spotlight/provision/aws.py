"""EC2: spot prices as they are and were, a run's instances, and why one ended. The only module that imports boto3."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import botocore.exceptions
from botocore.config import Config

from spotlight.core.cost import EndReason, Market, PricePoint, amount
from spotlight.errors import CredentialError, PreconditionError
from spotlight.provision.base import NodeState
from spotlight.provision.ends import CloudEnd
from spotlight.provision.machines import NODE_TAG, RUN_TAG, Machine
from spotlight.provision.prices import Quote

_SOURCE = "EC2 spot price history"
_LINUX = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]
_ALIVE = ("pending", "running")
_ENDED = ("shutting-down", "terminated", "stopping", "stopped")
_DENIED = {"AuthFailure", "UnauthorizedOperation", "InvalidClientTokenId", "ExpiredToken", "RequestExpired"}
# docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_STATE_REASONS: dict[str, EndReason] = {
    "Server.SpotInstanceTermination": "interrupted",
    "Server.SpotInstanceShutdown": "interrupted",
    "Server.InsufficientInstanceCapacity": "launch_failed",
    "Server.InternalError": "launch_failed",
    "Server.ScheduledStop": "failed",
    "Client.InstanceInitiatedShutdown": "user",
    "Client.UserInitiatedShutdown": "user",
    "Client.UserInitiatedHibernate": "user",
    "Client.InternalError": "launch_failed",
    "Client.VolumeLimitExceeded": "launch_failed",
}
# docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html: every other instance-terminated-*,
# instance-stopped-* and instance-hibernated-* is EC2's doing (price, capacity, launch group, ...).
_ENDED_BY_EC2 = re.compile(r"instance-(terminated|stopped|hibernated)-(?!by-user|by-schedule)")
_REASON_TIME = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def client(region: str, endpoint_url: str | None = None, *, service: str = "ec2") -> Any:
    """A client of EC2, or of another service, for a region. Raises CredentialError if boto3 knows no login."""
    config = Config(retries={"mode": "standard", "max_attempts": 5}, connect_timeout=5, read_timeout=20)
    with _clear_errors():
        session = boto3.Session(region_name=region)
        if session.get_credentials() is None:
            raise CredentialError("no AWS login found", hint="aws configure, or set AWS_ACCESS_KEY_ID")
        return session.client(service, config=config, endpoint_url=endpoint_url)


def vcpu_limit(quotas: Any, code: str) -> float:
    """How many vCPUs of a family may run at once; `quotas` is a client of "service-quotas".

    Raises CredentialError or PreconditionError where we may not ask.
    """
    with _clear_errors():
        return float(quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])


def bucket_login() -> tuple[Callable[[], Any] | None, dict[str, str]]:
    """boto3's login (profile, SSO, role) for an S3 bucket, as (credentials, options) of `store.open_store`.

    None: boto3 knows none either, and what the environment or the machine's role gives is left to the store.
    """
    from obstore.auth.boto3 import Boto3CredentialProvider

    with _clear_errors():
        session = boto3.Session()
        if session.get_credentials() is None:
            return None, {}
    return Boto3CredentialProvider(session), {"region": session.region_name} if session.region_name else {}


def spot_quotes(ec2: Any, instance_type: str, now_s: float) -> list[Quote]:
    """The spot price of a type in every zone of the client's region, as it is at `now_s` (UTC seconds)."""
    newest: dict[str, tuple[datetime, str]] = {}
    for row in _history(ec2, instance_type, "", now_s, now_s):
        zone, at, usd = row["AvailabilityZone"], row["Timestamp"], row["SpotPrice"]
        if zone not in newest or newest[zone][0] < at:
            newest[zone] = at, usd
    as_of = datetime.fromtimestamp(now_s, UTC).date().isoformat()
    region = ec2.meta.region_name
    return [
        Quote(Market("aws", region, zone, instance_type, "spot"), amount(usd), _SOURCE, as_of)
        for zone, (_, usd) in sorted(newest.items())
    ]


def spot_series(ec2: Any, instance_type: str, zone: str, start_s: float, end_s: float) -> list[PricePoint]:
    """Every price of a zone in force between two moments (UTC seconds), the one at the start included.

    EC2 keeps about 90 days. The result is in time order and may be empty.
    """
    as_of = datetime.fromtimestamp(end_s, UTC).date().isoformat()
    points = {
        row["Timestamp"].timestamp(): PricePoint(
            cloud="aws",
            region=ec2.meta.region_name,
            zone=zone,
            instance_type=instance_type,
            price_class="spot",
            at_s=row["Timestamp"].timestamp(),
            usd_per_h=amount(row["SpotPrice"]),
            source=_SOURCE,
            as_of=as_of,
        )
        for row in _history(ec2, instance_type, zone, start_s, end_s)
    }
    return [points[at_s] for at_s in sorted(points)]


def _history(
    ec2: Any, instance_type: str, zone: str, start_s: float, end_s: float
) -> Iterator[dict[str, Any]]:
    """Rows of the price history. EC2 adds the price in force at the start by itself, with its own time."""
    filters = [{"Name": "availability-zone", "Values": [zone]}] if zone else []
    with _clear_errors():
        pages = ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=[instance_type],
            ProductDescriptions=_LINUX,
            Filters=filters,
            StartTime=datetime.fromtimestamp(start_s, UTC),
            EndTime=datetime.fromtimestamp(end_s, UTC),
        )
        for page in pages:
            yield from page["SpotPriceHistory"]


class Ec2Ends:
    """Why EC2 instances of one region ended (see `ends.EndSource`). Instances are named by id, "i-..."."""

    def __init__(self, ec2: Any) -> None:
        self._ec2 = ec2

    def end_of(self, instance: str) -> CloudEnd | None:
        """The end of an instance, or None while it runs; see the protocol for the contract."""
        with _clear_errors():
            found = self._instance(instance)
            state = found["State"]["Name"] if found else "gone"
            if state in _ALIVE:
                return None
            request = self._spot_request(instance)
        keeps_disk = state in ("stopping", "stopped")
        status = request.get("Status", {}) if request else {}
        code = status.get("Code", "")
        if _ENDED_BY_EC2.match(code):
            at_s = _end_s(found or {}, status.get("UpdateTime"))
            return CloudEnd("interrupted", f"ec2:{code}", at_s, keeps_disk)
        if found is None:
            return CloudEnd("unknown", "ec2:not-found")
        return _by_state_reason(found, keeps_disk)

    def _instance(self, instance: str) -> dict[str, Any] | None:
        try:
            answer = self._ec2.describe_instances(InstanceIds=[instance])
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] in (
                "InvalidInstanceID.NotFound",
                "InvalidInstanceID.Malformed",
            ):
                return None
            raise
        return next((item for group in answer["Reservations"] for item in group["Instances"]), None)

    def _spot_request(self, instance: str) -> dict[str, Any] | None:
        """The spot request behind an instance; EC2 remembers it longer than the instance."""
        answer = self._ec2.describe_spot_instance_requests(
            Filters=[{"Name": "instance-id", "Values": [instance]}]
        )
        return next(iter(answer["SpotInstanceRequests"]), None)


class Ec2Machines:
    """A run's instances in one region (see `machines.MachineList`)."""

    def __init__(self, ec2: Any) -> None:
        self._ec2 = ec2

    def of_run(self, run: str) -> list[Machine]:
        """Instances with the run's tag; EC2 shows ended ones for about an hour."""
        return [_machine(found) for found in self._tagged([run]) if _tags(found)[RUN_TAG] == run]

    def runs(self) -> set[str]:
        """Runs that have a living instance."""
        return {
            _tags(found)[RUN_TAG] for found in self._tagged(["*"]) if found["State"]["Name"] not in _ENDED
        }

    def terminate(self, instances: list[str]) -> None:
        """End them; unknown ones are gone already."""
        with _clear_errors():
            for instance in instances:
                try:
                    self._ec2.terminate_instances(InstanceIds=[instance])
                except botocore.exceptions.ClientError as error:
                    if not error.response["Error"]["Code"].startswith("InvalidInstanceID"):
                        raise

    def _tagged(self, runs: list[str]) -> list[dict[str, Any]]:
        with _clear_errors():
            pages = self._ec2.get_paginator("describe_instances").paginate(
                Filters=[{"Name": f"tag:{RUN_TAG}", "Values": runs}]
            )
            return [item for page in pages for group in page["Reservations"] for item in group["Instances"]]


def _machine(found: dict[str, Any]) -> Machine:
    state = found["State"]["Name"]
    code = found.get("StateReason", {}).get("Code", "")
    gone = state in _ENDED
    return Machine(
        instance=found["InstanceId"],
        node=_tags(found).get(NODE_TAG, ""),
        zone=found.get("Placement", {}).get("AvailabilityZone", ""),
        spot=found.get("InstanceLifecycle") == "spot",
        state=NodeState.GONE if gone else NodeState.UP if state == "running" else NodeState.STARTING,
        launched_s=found["LaunchTime"].timestamp(),
        reason=code if gone else "",
        interrupted=gone and _STATE_REASONS.get(code) == "interrupted",
    )


def _tags(found: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}


def _by_state_reason(found: dict[str, Any], keeps_disk: bool) -> CloudEnd:
    code = found.get("StateReason", {}).get("Code", "")
    reason = _STATE_REASONS.get(code, "unknown")
    if reason == "user" and keeps_disk:
        reason = "stopped"
    return CloudEnd(reason, f"ec2:{code or 'no-reason'}", _end_s(found), keeps_disk)


def _end_s(found: dict[str, Any], updated: datetime | None = None) -> float | None:
    """When an instance ended: when its spot request changed, else as its last state change says in brackets.

    A time before the launch belongs to something else and is not believed.
    """
    said = _REASON_TIME.search(found.get("StateTransitionReason", ""))
    in_brackets = datetime.fromisoformat(said[1]).replace(tzinfo=UTC) if said else None
    launched = found.get("LaunchTime")
    for at in (updated, in_brackets):
        if at is not None and (launched is None or at >= launched.replace(microsecond=0)):
            return at.timestamp()
    return None


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """boto3's errors as ours."""
    try:
        yield
    except (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError) as error:
        raise CredentialError(f"AWS: {error}", hint="aws configure, or set AWS_ACCESS_KEY_ID") from error
    except botocore.exceptions.ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in _DENIED:
            raise CredentialError(f"AWS refused: {error}", hint="aws sts get-caller-identity") from error
        raise PreconditionError(f"EC2 could not answer: {error}") from error
    except botocore.exceptions.BotoCoreError as error:
        raise PreconditionError(f"EC2 cannot be reached: {error}") from error
