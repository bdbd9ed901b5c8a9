"""Is the cloud side fit? Logins, bucket, SkyPilot's port, and machines that nobody remembers.

Each finding is (name, ok | warn | fail, what was found, what to do). Looks only; what it writes into the bucket to see
whether it may, it removes again.
"""

from __future__ import annotations

import json
import socket
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from spotlight.errors import SpotlightError
from spotlight.provision import skypilot
from spotlight.provision.buckets import open_bucket
from spotlight.provision.launch import Launch
from spotlight.provision.machines import MachineList, machine_list

Finding = tuple[str, str, str, str]
SKY_PORT = 46580


def examine(runs: Path, store: str) -> Iterator[Finding]:
    """All findings; `runs` is the folder of all runs, `store` the bucket prefix in use or empty."""
    for cloud in skypilot.CLOUDS:
        yield check_login(cloud)
    yield check_port(SKY_PORT)
    yield check_bucket(store)
    yield from check_machines(runs)


def check_login(cloud: str) -> Finding:
    """SkyPilot can use the cloud. Not every cloud need be logged in to."""
    try:
        skypilot.enabled_clouds(cloud)
    except SpotlightError as error:
        return f"login {cloud}", "warn", error.message.splitlines()[-1], error.hint or "sky check"
    return f"login {cloud}", "ok", "SkyPilot has a login", ""


def check_port(port: int) -> Finding:
    """SkyPilot's local server has its port, or can have it."""
    name = "SkyPilot's port"
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return name, "ok", f"{port} is free", ""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/api/health", timeout=5) as answer:
            status = json.loads(answer.read(65_536)).get("status")
    except (OSError, ValueError, AttributeError):
        return name, "fail", f"another program has {port}", "end it, or set SKYPILOT_LOCAL_API_SERVER_PORT"
    return name, "ok", f"its server answers on {port} ({status})", ""


def check_bucket(store: str) -> Finding:
    """The bucket can be written, read, listed and cleaned, create-only writes included."""
    if not store:
        return (
            "bucket",
            "warn",
            "none named",
            "set SPOTLIGHT_STORE to s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
        )
    key = f"doctor/{uuid.uuid4().hex}"
    try:
        bucket = open_bucket(store)
        if bucket.put_new(key, b"probe") is None or bucket.put_new(key, b"again") is not None:
            return "bucket", "fail", f"{store} keeps no create-only writes", "a bucket of S3 or GCS itself"
        bucket.get(key)
        bucket.list_keys("doctor")
        bucket.delete(key)
    except SpotlightError as error:
        return "bucket", "fail", error.message, error.hint or ""
    return "bucket", "ok", f"{store}: write, read, list, delete", ""


def check_machines(runs: Path, lists: Callable[[str, str], MachineList] = machine_list) -> Iterator[Finding]:
    """In every region that a run of ours was in: no machine lives whose run is unknown or was taken down."""
    known: dict[tuple[str, str], set[str]] = {}
    for folder in sorted(runs.glob("*/launch.json")):
        try:
            launch = Launch.load(folder.parent)
        except SpotlightError as error:
            yield folder.parent.name, "warn", error.message, "delete the folder if the run is over"
            continue
        standing = known.setdefault((launch.cloud, launch.region), set())
        if not (folder.parent / "down").exists():
            standing.add(launch.run)
    for (cloud, region), standing in known.items():
        name = f"machines {cloud}/{region}"
        try:
            living = lists(cloud, region).runs()
        except SpotlightError as error:
            yield name, "warn", error.message, error.hint or ""
            continue
        if orphans := sorted(living - standing):
            yield (
                name,
                "fail",
                f"nobody's: {', '.join(orphans)}",
                "end them in the cloud's console, or by their tag",
            )
        else:
            yield name, "ok", f"{len(living)} runs have machines", ""
