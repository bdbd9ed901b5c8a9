"""Compute Engine end reasons: the real google-cloud-compute against a small local fake of its REST API."""

from __future__ import annotations

import json
import re
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import end_source_contract
import pytest
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials

from spotlight.core.cost import utc_seconds
from spotlight.errors import CredentialError, PreconditionError, UserError
from spotlight.provision import gcp

PROJECT, ZONE = "lab", "us-east4-a"
ROOT = f"/compute/v1/projects/{PROJECT}/zones/{ZONE}"


class FakeGce:
    """Instances and zone operations as Compute Engine lists them: get by name, list by filter."""

    def __init__(self) -> None:
        self.instances: dict[str, dict] = {}
        self.operations: list[dict] = []
        self.refuse: int | None = None
        self._next = 1000
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                status, body = fake.answer(self.path)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, url: str) -> tuple[int, dict]:
        path, _, query = url.partition("?")
        if self.refuse:
            return self.refuse, {"error": {"code": self.refuse, "message": "refused"}}
        if path == f"{ROOT}/operations":
            wanted = re.findall(r"operationType%3D%22([^%]+)%22", query)
            assert wanted, "the filter must be sent: a zone has thousands of operations"
            # Two to a page, so that paging is exercised.
            start = int(re.search(r"pageToken=(\d+)", query)[1]) if "pageToken" in query else 0
            found = [o for o in self.operations if o["operationType"] in wanted]
            page = {"items": found[start : start + 2]}
            return 200, page | ({"nextPageToken": str(start + 2)} if start + 2 < len(found) else {})
        name = path.removeprefix(f"{ROOT}/instances/")
        if name in self.instances:
            return 200, self.instances[name]
        return 404, {"error": {"code": 404, "message": f"The resource {name} was not found"}}

    def insert(self, name: str) -> str:
        self._next += 1
        self.instances[name] = {"id": str(self._next), "name": name, "status": "RUNNING"}
        self.operate("insert", name)
        return str(self._next)

    def operate(self, kind: str, name: str, at: datetime | None = None) -> None:
        # Compute Engine writes local time of its own region with an offset, not UTC.
        when = (at or datetime.now(UTC)).astimezone(
            datetime.fromisoformat("2026-01-01T00:00:00-08:00").tzinfo
        )
        self.operations.append(
            {
                "id": str(len(self.operations) + 1),
                "operationType": kind,
                "status": "DONE",
                "insertTime": when.isoformat(timespec="milliseconds"),
                "targetId": self.instances[name]["id"],
                "targetLink": f"https://www.googleapis.com{ROOT}/instances/{name}",
            }
        )


class GceWorld:
    prefix = "gce:"
    never_existed = f"{ZONE}/nobody"

    def __init__(self) -> None:
        self.gce = FakeGce()
        options = ClientOptions(api_endpoint=self.gce.url)
        self.source = gcp.GceEnds(PROJECT, options=options, credentials=AnonymousCredentials())
        self._count = 0

    def run(self) -> str:
        self._count += 1
        name = f"vm{self._count}"
        self.gce.insert(name)
        return f"{ZONE}/{name}"

    def interrupt(self, instance: str) -> None:
        name = instance.split("/")[1]
        self.gce.operate("compute.instances.preempted", name)
        del self.gce.instances[name]

    def interrupt_to_stop(self, instance: str) -> None:
        name = instance.split("/")[1]
        self.gce.operate("compute.instances.preempted", name)
        self.gce.instances[name]["status"] = "TERMINATED"

    def terminate(self, instance: str) -> None:
        name = instance.split("/")[1]
        self.gce.operate("delete", name)
        del self.gce.instances[name]

    def stop(self, instance: str) -> None:
        name = instance.split("/")[1]
        self.gce.operate("stop", name)
        self.gce.instances[name]["status"] = "TERMINATED"


@pytest.fixture
def world():
    world = GceWorld()
    yield world
    world.gce.server.shutdown()
    world.gce.server.server_close()


@pytest.mark.parametrize("clause", end_source_contract.CONTRACT, ids=lambda clause: clause.__name__)
def test_end_source_contract(world, clause):
    clause(world)


def test_a_preempted_machine_that_we_deleted_afterwards_was_preempted(world):
    instance = world.run()
    world.interrupt_to_stop(instance)
    world.terminate(instance)
    end = world.source.end_of(instance)
    assert (end.reason, end.keeps_disk) == ("interrupted", False)


def test_a_later_machine_of_the_same_name_is_another_one(world):
    gce = world.gce
    first = gce.insert("s3")
    gce.operate("compute.instances.preempted", "s3")
    second = gce.insert("s3")
    assert world.source.end_of(f"{ZONE}/s3/{second}") is None
    assert world.source.end_of(f"{ZONE}/s3") is None
    assert world.source.end_of(f"{ZONE}/s3/{first}").reason == "interrupted"
    gce.operate("delete", "s3")
    del gce.instances["s3"]
    assert world.source.end_of(f"{ZONE}/s3").reason == "user"


def test_a_name_that_begins_like_another_is_not_it(world):
    gce = world.gce
    gce.insert("s30")
    gce.operate("compute.instances.preempted", "s30")
    gce.insert("s3")
    del gce.instances["s3"]
    assert world.source.end_of(f"{ZONE}/s3").reason == "unknown"


def test_the_time_is_the_operation_s_in_utc(world):
    instance = world.run()
    name = instance.split("/")[1]
    world.gce.operate("compute.instances.preempted", name, datetime(2026, 3, 2, 10, 59, 59, tzinfo=UTC))
    del world.gce.instances[name]
    assert world.source.end_of(instance).at_s == utc_seconds("2026-03-02T10:59:59+00:00")


def test_a_host_error_is_no_preemption(world):
    instance = world.run()
    world.gce.operate("compute.instances.hostError", instance.split("/")[1])
    world.gce.instances[instance.split("/")[1]]["status"] = "TERMINATED"
    assert world.source.end_of(instance).reason == "failed"


def test_refused_and_unreachable_are_told_apart(world):
    world.gce.refuse = 403
    with pytest.raises(CredentialError):
        world.source.end_of(f"{ZONE}/x")
    world.gce.refuse = 500
    with pytest.raises(PreconditionError):
        world.source.end_of(f"{ZONE}/x")


@pytest.mark.parametrize("bad", ["", "name", "a/b/c/d", "zone/"])
def test_a_bad_name_is_a_user_error(world, bad):
    with pytest.raises(UserError):
        world.source.end_of(bad)
