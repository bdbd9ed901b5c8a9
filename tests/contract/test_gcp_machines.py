"""A run's machines on Compute Engine: the real google-cloud-compute against a small fake of its REST API."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials

from spotlight.errors import CredentialError, PreconditionError
from spotlight.provision import gcp
from spotlight.provision.base import NodeState

PROJECT, REGION = "lab", "us-east4"
ROOT = f"/compute/v1/projects/{PROJECT}"


class FakeGce:
    """Aggregated list and delete, as the API answers them; a deleted instance is STOPPING until it is gone."""

    def __init__(self) -> None:
        self.instances: dict[tuple[str, str], dict] = {}
        self.refuse = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer("GET")

            def do_DELETE(self) -> None:
                self.answer("DELETE")

            def answer(self, method: str) -> None:
                status, body = fake.answer(method, self.path.partition("?")[0], self.path)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def add(self, zone: str, name: str, *, spot: bool = False, **labels: str) -> str:
        number = str(1000 + len(self.instances))
        self.instances[zone, name] = {
            "id": number,
            "name": name,
            "status": "RUNNING",
            "labels": {key.replace("_", "-"): value for key, value in labels.items()},
            "zone": f"https://www.googleapis.com{ROOT}/zones/{zone}",
            "scheduling": {"provisioningModel": "SPOT" if spot else "STANDARD"},
            "creationTimestamp": "2026-03-02T04:05:06.789-08:00",
        }
        return f"{zone}/{name}/{number}"

    def answer(self, method: str, path: str, url: str) -> tuple[int, dict]:
        if self.refuse:
            return self.refuse, {"error": {"code": self.refuse, "message": "refused"}}
        if path == f"{ROOT}/aggregated/instances":
            assert "labels.spotlight-run" in url.replace("%3A", ":"), "the filter must be sent"
            zones = sorted({zone for zone, _ in self.instances} | {"empty-1-a"})
            start = int(found[1]) if (found := re.search(r"pageToken=(\d+)", url)) else 0
            items = {f"zones/{zone}": self.zone(zone) for zone in zones[start : start + 2]}
            more = {"nextPageToken": str(start + 2)} if start + 2 < len(zones) else {}
            return 200, {"items": items} | more
        match = re.fullmatch(rf"{ROOT}/zones/([^/]+)/instances/([^/]+)", path)
        if match and method == "DELETE" and match.groups() in self.instances:
            self.instances[match[1], match[2]]["status"] = "STOPPING"
            return 200, {"name": "operation-1", "status": "RUNNING"}
        return 404, {"error": {"code": 404, "message": "not found"}}

    def zone(self, zone: str) -> dict:
        found = [item for (place, _), item in self.instances.items() if place == zone]
        return {"instances": found} if found else {"warning": {"code": "NO_RESULTS_ON_PAGE"}}


@pytest.fixture
def gce() -> Iterator[FakeGce]:
    found = FakeGce()
    yield found
    found.server.shutdown()
    found.server.server_close()


def machines(gce: FakeGce) -> gcp.GceMachines:
    options = ClientOptions(api_endpoint=gce.url)
    return gcp.GceMachines(PROJECT, REGION, options=options, credentials=AnonymousCredentials())


def test_machines_of_a_run_are_those_with_its_label_in_its_region(gce: FakeGce) -> None:
    head = gce.add("us-east4-a", "head", spotlight_run="mine", spotlight_node="od0")
    spot = gce.add("us-east4-c", "s0", spot=True, spotlight_run="mine", spotlight_node="s0")
    gce.add("us-east4-a", "other", spotlight_run="other", spotlight_node="od0")
    gce.add("us-west1-a", "far", spotlight_run="mine", spotlight_node="od0")
    gce.add("us-east4-b", "bystander", team="x")
    found = {machine.instance: machine for machine in machines(gce).of_run("mine")}
    assert found.keys() == {head, spot}
    assert (found[head].node, found[head].spot, found[head].zone) == ("od0", False, "us-east4-a")
    assert (found[spot].node, found[spot].spot, found[spot].state) == ("s0", True, NodeState.UP)
    assert found[spot].launched_s == pytest.approx(1_772_453_106.789)
    assert machines(gce).runs() == {"mine", "other"}


def test_terminated_machines_are_gone_and_unknown_ones_no_error(gce: FakeGce) -> None:
    head = gce.add("us-east4-a", "head", spotlight_run="mine", spotlight_node="od0")
    spot = gce.add("us-east4-a", "s0", spot=True, spotlight_run="mine", spotlight_node="s0")
    machines(gce).terminate([head, "us-east4-a/nobody/1"])
    found = {machine.instance: machine for machine in machines(gce).of_run("mine")}
    assert (found[head].state, found[head].interrupted) == (NodeState.GONE, False)
    gce.instances["us-east4-a", "s0"]["status"] = "TERMINATED"
    (taken,) = (machine for machine in machines(gce).of_run("mine") if machine.instance == spot)
    assert (taken.state, taken.reason, taken.interrupted) == (NodeState.GONE, "TERMINATED", True)


@pytest.mark.parametrize(("status", "error"), [(403, CredentialError), (500, PreconditionError)])
def test_refusals_are_told_apart(gce: FakeGce, status: int, error: type[Exception]) -> None:
    gce.refuse = status
    with pytest.raises(error):
        machines(gce).of_run("mine")
