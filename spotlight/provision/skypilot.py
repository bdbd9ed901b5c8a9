"""Machines through SkyPilot: what it offers, and one cluster per node. The only module that imports sky.

SkyPilot launches and sets up; what exists is asked of the cloud itself (`machines`), by tag. Importing `sky` takes
seconds and must not find our own folder of that name, so it is done late and in one place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spotlight.core.capacity import GpuRequest, Offer
from spotlight.core.cost import Market, PriceClass, amount
from spotlight.errors import (
    CapacityError,
    CredentialError,
    PreconditionError,
    SpotlightError,
    UserError,
)
from spotlight.provision import templates
from spotlight.provision.base import NodeInfo, NodeSpec, NodeState, Role
from spotlight.provision.launch import IDLE_MINUTES, Launch
from spotlight.provision.machines import NODE_TAG, RUN_TAG, Machine, MachineList
from spotlight.provision.prices import Quote, screen
from spotlight.provision.refusals import translated

CLOUDS = ("aws", "gcp")  # those whose own list of machines we can ask
_INFRA = re.compile(r"([a-z]{2,12})(?:/([a-z]{2,12}(?:-[a-z0-9]{1,16}){0,4}))?", re.ASCII)
_UNDER_WAY = ("PENDING", "RUNNING", "WAITING", "QUEUED")  # of a request to SkyPilot's server
log = logging.getLogger(__name__)


class _Words:
    """A stream without the markup in which SkyPilot tells its own client of spinners."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Pass it on."""
        return len(text) if text.startswith("<sky-payload") else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def its_words_aside() -> contextlib.AbstractContextManager[Any]:
    """SkyPilot prints; stdout is for data."""
    return contextlib.redirect_stdout(_Words(sys.stderr))


def require() -> Any:
    """SkyPilot's package. Raises CredentialError when it is not installed (a bare folder `sky/` is not it)."""
    spec = importlib.util.find_spec("sky")
    if spec is None or spec.origin is None:
        raise CredentialError(
            "SkyPilot is not installed",
            hint="pip install 'skypilot[aws,gcp]>=0.14'; local runs work without it",
        )
    with its_words_aside():  # its log goes to the stream that it finds now
        import sky

    return sky


def warm_up() -> None:
    """Begin to start SkyPilot's server, which takes it a while, and do not wait. A failure shows when it is used."""

    def start() -> None:
        try:
            require().api_start()
        except Exception as error:  # noqa: BLE001 - the first launch tries again and tells
            log.debug("SkyPilot's server: %s", error)

    threading.Thread(target=start, daemon=True, name="skypilot").start()


def parse_infra(text: str | None) -> tuple[str | None, str | None]:
    """`aws` or `aws/us-east-1` as (cloud, region); None: anywhere. Raises UserError."""
    if not text:
        return None, None
    if "," in text:
        raise UserError(
            f"--infra {text[:60]!r} spans more than one place",
            hint="no private network joins regions or clouds: name one region",
        )
    match = _INFRA.fullmatch(text)
    if match is None or match[1] not in CLOUDS:
        raise UserError(f"bad infra {text[:60]!r}", hint=f"CLOUD or CLOUD/REGION of {', '.join(CLOUDS)}")
    return match[1], match[2]


def enabled_clouds(wanted: str | None = None) -> list[str]:
    """Clouds that we support and have a login for. Raises CredentialError naming what is missing."""
    sky = require()
    enabled, reasons = [], []
    for name in (wanted,) if wanted else CLOUDS:
        try:
            cloud = _cloud(name)
            good, why = cloud.check_credentials(sky.clouds.CloudCapability.COMPUTE)
        except Exception as error:  # noqa: BLE001 - a cloud's package may fail in any way
            good, why = False, str(error)
        if good:
            enabled.append(name)
        else:
            reasons.append(f"{name}: {' '.join(str(why).split())[:160]}")
    if not enabled:
        raise CredentialError("no cloud login found\n" + "\n".join(reasons), hint="sky check")
    return enabled


def offers(requests: Sequence[GpuRequest], cloud: str | None, region: str | None) -> list[Offer]:
    """Machines with those GPUs, zone by zone, with catalog prices that are plausible. Raises CredentialError."""
    sky = require()
    as_of = datetime.now(UTC).date().isoformat()
    found: list[Offer] = []
    with its_words_aside():  # it tells of catalogs that it fetches
        for name in enabled_clouds(cloud):
            for request in requests:
                found += _catalog(sky, name, request, region)
    screened = screen(Quote(_market(offer), offer.usd_per_h, offer.source, as_of) for offer in found)
    return [offer for offer, quote in zip(found, screened, strict=True) if not quote.problem]


def quota_code(instance_type: str, spot: bool) -> tuple[str, float]:
    """(AWS's code of the limit that machines of a type count against, or "" if none is known; vCPUs of one)."""
    sky = require()
    from sky.catalog import aws_catalog

    with its_words_aside():
        code = aws_catalog.get_quota_code(instance_type, spot)
        vcpus, _ = sky.catalog.get_vcpus_mem_from_instance_type(instance_type, "aws")
    return code if isinstance(code, str) else "", float(vcpus or 0)


def _market(offer: Offer) -> Market:
    return Market(offer.cloud, offer.region, offer.zone, offer.instance_type, offer.price_class)


def _cloud(name: str) -> Any:
    from sky.utils import registry

    return registry.CLOUD_REGISTRY.from_str(name)


def _catalog(sky: Any, cloud_name: str, request: GpuRequest, region: str | None) -> Iterator[Offer]:
    cloud = _cloud(cloud_name)
    known = sky.catalog.list_accelerators(
        name_filter=f"^{re.escape(request.gpu)}$", clouds=cloud_name, case_sensitive=False
    )
    for gpu, items in known.items():
        for gpus in sorted({int(item.accelerator_count) for item in items if item.accelerator_count >= 1}):
            for spot in (False, True):
                asked = sky.Resources(infra=cloud_name, accelerators={gpu: gpus}, use_spot=spot)
                feasible = cloud.get_feasible_launchable_resources(asked).resources_list
                for machine in feasible:
                    yield from _places(sky, machine, gpu, gpus, spot, region)


def _places(sky: Any, machine: Any, gpu: str, gpus: int, spot: bool, region: str | None) -> Iterator[Offer]:
    regions = machine.cloud.regions_with_offering(
        machine.instance_type, machine.accelerators, spot, region, None, machine
    )
    price_class: PriceClass = "spot" if spot else "on_demand"
    for place in regions:
        for zone in [zone.name for zone in place.zones or ()] if spot else [None]:
            try:
                usd = machine.copy(region=place.name, zone=zone).get_cost(3600)
                yield Offer(
                    gpu=gpu,
                    gpus=gpus,
                    cloud=str(machine.cloud).lower(),
                    region=place.name,
                    zone=zone or "",
                    instance_type=machine.instance_type,
                    price_class=price_class,
                    usd_per_h=amount(str(round(usd, 6))),
                    source="SkyPilot catalog",
                )
            except (ValueError, TypeError) as error:  # no price there
                log.debug("%s %s %s: %s", machine.instance_type, place.name, zone, error)


class SkyProvider:
    """The machines of one launch (see `base.Provider`). `launch` blocks until the node's job has been submitted.

    A local API server works on four launches at once, so ask for no more. `envs` are those that all nodes share.
    """

    def __init__(
        self,
        launch: Launch,
        machines: MachineList,
        *,
        token: str,
        mounts: Mapping[str, Path],
        envs: Mapping[str, str],
        deadline_s: float = 1800.0,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._launch, self._machines = launch, machines
        self._token, self._mounts, self._envs = token, mounts, envs
        self._deadline_s, self._wait = deadline_s, wait
        self._under_way: dict[str, Any] = {}
        self._launched: set[str] = set()

    def launch(self, spec: NodeSpec) -> None:
        """Have SkyPilot bring the node up, or find it up. A launch past its deadline is a CapacityError."""
        if any(info.name == spec.name and info.state is not NodeState.GONE for info in self.list()):
            return
        sky = require()
        cluster = templates.cluster_name(self._launch.run, spec.name)
        with _clear_errors(spec.name):
            if spec.name in self._launched:  # make SkyPilot see that the machine before is gone
                sky.get(sky.status([cluster], refresh=sky.StatusRefreshMode.FORCE))
            self._launched.add(spec.name)
            request = sky.launch(
                self._task(sky, spec), cluster_name=cluster, idle_minutes_to_autostop=IDLE_MINUTES, down=True
            )
            self._under_way[spec.name] = request
            try:
                self._await(sky, request, spec)
            finally:
                self._under_way.pop(spec.name, None)

    def list(self) -> list[NodeInfo]:
        """Of every node the machine that lives, else the last one, as the cloud lists them."""
        by_node: dict[str, Machine] = {}
        for machine in sorted(self._machines.of_run(self._launch.run), key=_alive_last):
            by_node[machine.node] = machine
        return [_info(machine) for machine in by_node.values() if machine.node]

    def terminate(self, name: str) -> None:
        """Withdraw a launch under way, end every machine of that name, and make sure (see `end_machines`)."""
        if request := self._under_way.pop(name, None):
            sky = require()
            sky.get(sky.api_cancel(request_ids=[request]))
        end_machines(self._machines, self._launch.run, node=name, wait=self._wait)

    def _task(self, sky: Any, spec: NodeSpec) -> Any:
        row = self._launch.nodes()[spec.name]
        own = {
            "SPOTLIGHT_RUN": self._launch.run,
            "SPOTLIGHT_NODE": spec.name,
            "SPOTLIGHT_GPUS": str(row.gpus),
        }
        spot = spec.role is Role.SPOT
        tree = templates.task(
            "spot" if spot else "ondemand",
            envs={**own, **self._envs},
            secrets={"SPOTLIGHT_RAY_TOKEN": self._token},
            mounts=self._mounts,
        )
        task = sky.Task.from_yaml_config(tree)
        if spec.head:
            task.num_nodes = len(self._launch.specs(Role.ON_DEMAND))
        task.set_resources([self._resources(sky, spec, zone) for zone in spec.zones or (None,)])
        return task

    def _resources(self, sky: Any, spec: NodeSpec, zone: str | None) -> Any:
        row = self._launch.nodes()[spec.name]
        return sky.Resources(
            infra="/".join([row.cloud, row.region, *([zone] if zone else [])]),
            instance_type=row.instance_type,
            accelerators={row.gpu: row.gpus},
            use_spot=spec.role is Role.SPOT,
            image_id=self._launch.image or None,
            labels={RUN_TAG: self._launch.run, NODE_TAG: spec.name},
        )

    def _await(self, sky: Any, request: Any, spec: NodeSpec) -> None:
        """Poll the request. When time is up, withdraw it and end what it has made; on any other end, withdraw it."""
        deadline = time.monotonic() + self._deadline_s
        try:
            while time.monotonic() < deadline:
                (answer,) = sky.api_status(request_ids=[request])
                if str(answer.status).rsplit(".", 1)[-1] not in _UNDER_WAY:
                    _result(sky, request, spec.name)
                    return
                self._wait(1.0)
        except BaseException:  # Ctrl-C too: SkyPilot's server would go on without us
            sky.get(sky.api_cancel(request_ids=[request]))
            raise
        sky.get(sky.api_cancel(request_ids=[request]))
        self.terminate(spec.name)
        raise CapacityError(f"{spec.name} did not come up within {self._deadline_s:.0f} s")


def end_machines(
    machines: MachineList,
    run: str,
    *,
    node: str | None = None,
    deadline_s: float = 180.0,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """End all machines of a run, or of one node, until the cloud's list shows none alive; returns how many.

    Raises PreconditionError naming the machines that would not end.
    """
    deadline = time.monotonic() + deadline_s
    ended: set[str] = set()
    while True:
        alive = [
            machine.instance
            for machine in machines.of_run(run)
            if machine.state is not NodeState.GONE and node in (None, machine.node)
        ]
        if not alive:
            return len(ended)
        if time.monotonic() > deadline:
            raise PreconditionError(
                f"still there after {deadline_s:.0f} s: {', '.join(alive[:10])}", hint=f"spotlight down {run}"
            )
        machines.terminate(alive)
        ended.update(alive)
        wait(1.0)


def user_config() -> Path:
    """The user's own SkyPilot settings, which may not exist."""
    return Path(os.environ.get("SKYPILOT_GLOBAL_CONFIG") or Path.home() / ".sky" / "config.yaml").expanduser()


def forget(cluster: str) -> None:
    """Remove SkyPilot's own record of a cluster whose machines have been ended; no record is fine."""
    try:
        sky = require()
        with its_words_aside():
            sky.get(sky.down(cluster, purge=True))
    except Exception as error:  # noqa: BLE001 - the machines are gone; the record is cosmetic
        log.debug("sky down %s: %s", cluster, error)


def read_logs(cluster: str, lines: int = 200) -> int:
    """Print the end of a cluster's job log on stdout; returns the job's exit code."""
    sky = require()
    return int(sky.tail_logs(cluster, None, follow=False, tail=lines) or 0)


@contextlib.contextmanager
def _clear_errors(node: str) -> Iterator[None]:
    """SkyPilot's errors as ours: quota and credentials are told from what may pass."""
    try:
        yield
    except SpotlightError:
        raise
    except Exception as error:  # SkyPilot passes on whatever the clouds' packages raise
        raise translated(error, node) from error


def _result(sky: Any, request: Any, node: str) -> None:
    """The end of a launch. SkyPilot's exception names no cause; what the cloud said is in the request's log alone."""
    try:
        sky.get(request)
    except Exception as error:  # whatever the clouds' packages raise
        log_text = io.StringIO()
        with contextlib.suppress(Exception):  # it ends in the same exception again
            sky.stream_and_get(request, follow=False, output_stream=log_text)
        raise translated(error, node, log_text.getvalue()) from error


def _alive_last(machine: Machine) -> tuple[bool, float]:
    return machine.state is not NodeState.GONE, machine.launched_s


def _info(machine: Machine) -> NodeInfo:
    return NodeInfo(
        name=machine.node,
        role=Role.SPOT if machine.spot else Role.ON_DEMAND,
        instance=machine.instance,
        state=machine.state,
        reason=machine.reason,
        zone=machine.zone,
        interrupted=machine.interrupted,
    )
