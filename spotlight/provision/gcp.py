"""Compute Engine: a run's instances, and why one ended. The only module that imports google.cloud."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import google.api_core.exceptions as gexc
import google.auth
import google.auth.exceptions
from google.api_core.client_options import ClientOptions
from google.cloud import compute_v1

from spotlight.core.cost import EndReason, utc_seconds
from spotlight.errors import CredentialError, PreconditionError, UserError
from spotlight.provision.base import NodeState
from spotlight.provision.ends import CloudEnd
from spotlight.provision.machines import NODE_TAG, RUN_TAG, Machine

_ALIVE = ("PENDING", "PROVISIONING", "STAGING", "RUNNING", "REPAIRING")
_PREEMPTED = "compute.instances.preempted"
_OPERATIONS: dict[str, EndReason] = {
    _PREEMPTED: "interrupted",
    "delete": "user",
    "stop": "user",
    "suspend": "user",
    "compute.instances.guestTerminate": "user",
    "compute.instances.hostError": "failed",
    "compute.instances.terminateOnHostMaintenance": "failed",
}
_TIMEOUT_S = 20.0


class GceEnds:
    """Why instances of one project ended (see `ends.EndSource`).

    Instances are named "zone/name" or "zone/name/id"; with the numeric id, a later machine of the same name
    is told apart. `options` (endpoint, quota project) and `credentials` go to google-cloud-compute.
    """

    def __init__(
        self, project: str, *, options: ClientOptions | None = None, credentials: Any = None
    ) -> None:
        self._project = project
        with _clear_errors():
            self._instances = compute_v1.InstancesClient(client_options=options, credentials=credentials)
            self._operations = compute_v1.ZoneOperationsClient(
                client_options=options, credentials=credentials
            )

    def end_of(self, instance: str) -> CloudEnd | None:
        """The end of an instance, or None while it runs; see the protocol for the contract."""
        zone, name, instance_id = _parse(instance)
        with _clear_errors():
            found = self._instance(zone, name, instance_id)
            if found is not None and found.status in _ALIVE:
                return None
            last = self._last_ending_operation(zone, name, instance_id)
        if last is None:
            return CloudEnd("unknown", "gce:no-operation", _stopped_at(found), found is not None)
        reason = _OPERATIONS[last.operation_type]
        if reason == "user" and found is not None:
            reason = "stopped"
        return CloudEnd(reason, f"gce:{last.operation_type}", _time(last), found is not None)

    def _instance(self, zone: str, name: str, instance_id: str) -> compute_v1.Instance | None:
        """The machine, if it is still listed and still the same one."""
        try:
            found = self._instances.get(project=self._project, zone=zone, instance=name, timeout=_TIMEOUT_S)
        except gexc.NotFound:
            return None
        return found if not instance_id or str(found.id) == instance_id else None

    def _last_ending_operation(self, zone: str, name: str, instance_id: str) -> compute_v1.Operation | None:
        """The first operation that ended this machine: a preempted one is often deleted afterwards by us."""
        types = " OR ".join(f'(operationType="{kind}")' for kind in _OPERATIONS)
        request = compute_v1.ListZoneOperationsRequest(project=self._project, zone=zone, filter=types)
        ours = [
            operation
            for operation in self._operations.list(request=request, timeout=_TIMEOUT_S)
            if operation.operation_type in _OPERATIONS
            and operation.target_link.endswith(f"/zones/{zone}/instances/{name}")
            and (not instance_id or str(operation.target_id) == instance_id)
        ]
        if not instance_id and ours:  # names are used again: keep to the newest machine of that name
            newest = max(ours, key=_time).target_id
            ours = [operation for operation in ours if operation.target_id == newest]
        return min(ours, key=_time, default=None)


class GceMachines:
    """A run's instances in one region (see `machines.MachineList`). SkyPilot's labels carry the tags."""

    def __init__(
        self, project: str, region: str, *, options: ClientOptions | None = None, credentials: Any = None
    ) -> None:
        self._project, self._region = project, region
        with _clear_errors():
            self._instances = compute_v1.InstancesClient(client_options=options, credentials=credentials)

    def of_run(self, run: str) -> list[Machine]:
        """Instances with the run's label; a deleted one is not listed any more."""
        return [_machine(found) for found in self._labelled() if found.labels[RUN_TAG] == run]

    def runs(self) -> set[str]:
        """Runs that have a living instance."""
        return {found.labels[RUN_TAG] for found in self._labelled() if found.status in _ALIVE}

    def terminate(self, instances: list[str]) -> None:
        """Delete them; unknown ones are gone already."""
        with _clear_errors():
            for instance in instances:
                zone, name, _ = _parse(instance)
                request = compute_v1.DeleteInstanceRequest(project=self._project, zone=zone, instance=name)
                with contextlib.suppress(gexc.NotFound):
                    self._instances.delete_unary(request=request, timeout=_TIMEOUT_S)

    def _labelled(self) -> list[compute_v1.Instance]:
        request = compute_v1.AggregatedListInstancesRequest(
            project=self._project, filter=f"labels.{RUN_TAG}:*"
        )
        with _clear_errors():
            pages = self._instances.aggregated_list(request=request, timeout=_TIMEOUT_S)
            return [
                found
                for place, part in pages
                if place.removeprefix("zones/").startswith(f"{self._region}-")
                for found in part.instances
                if RUN_TAG in found.labels
            ]


def _machine(found: compute_v1.Instance) -> Machine:
    zone = found.zone.rsplit("/", 1)[-1]
    gone = found.status not in _ALIVE
    spot = found.scheduling.provisioning_model == "SPOT"
    return Machine(
        instance=f"{zone}/{found.name}/{found.id}",
        node=found.labels.get(NODE_TAG, ""),
        zone=zone,
        spot=spot,
        state=NodeState.GONE if gone else NodeState.UP if found.status == "RUNNING" else NodeState.STARTING,
        launched_s=utc_seconds(found.creation_timestamp),
        reason=found.status if gone else "",
        # Only the operations say for certain (`GceEnds`); nobody stops a spot machine of a run but the cloud or us.
        interrupted=gone and spot,
    )


def default_project() -> str:
    """The project of the login. Raises CredentialError."""
    with _clear_errors():
        _, project = google.auth.default()
    if not project:
        raise CredentialError("no GCP project is set", hint="gcloud config set project ID")
    return str(project)


def _parse(instance: str) -> tuple[str, str, str]:
    parts = instance.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise UserError(
            f"not an instance of Compute Engine: {instance[:80]!r}", hint="zone/name or zone/name/id"
        )
    return parts[0], parts[1], parts[2] if len(parts) == 3 else ""


def _time(operation: compute_v1.Operation) -> float:
    return utc_seconds(operation.insert_time)


def _stopped_at(found: compute_v1.Instance | None) -> float | None:
    return utc_seconds(found.last_stop_timestamp) if found and found.last_stop_timestamp else None


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """Google's errors as ours."""
    try:
        yield
    except google.auth.exceptions.GoogleAuthError as error:
        raise CredentialError(f"GCP: {error}", hint="gcloud auth application-default login") from error
    except (gexc.Unauthorized, gexc.Forbidden) as error:
        raise CredentialError(f"GCP refused: {error}", hint="the account needs compute.viewer") from error
    except (gexc.GoogleAPIError, OSError) as error:
        raise PreconditionError(f"Compute Engine could not answer: {error}") from error
