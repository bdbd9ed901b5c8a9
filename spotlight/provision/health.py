"""Is the cloud side fit? Logins, clock, limits, bucket, SkyPilot's port, and machines that nobody remembers.

Each finding is (name, ok | warn | fail, what was found, what to do). Looks only; what it writes into the bucket to see
whether it may, it removes again.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from spotlight.core.capacity import PlanRow
from spotlight.errors import SpotlightError
from spotlight.provision import skypilot
from spotlight.provision.buckets import open_bucket
from spotlight.provision.launch import Launch
from spotlight.provision.machines import MachineList, machine_list

Finding = tuple[str, str, str, str]
SKY_PORT = 46580
CLOCKS = {"aws": "https://sts.amazonaws.com", "gcp": "https://compute.googleapis.com"}  # all tell the time
REFUSED_S = 300.0  # AWS takes no request whose clock is off by more
NOTABLE_S = 10.0


def examine(runs: Path, store: str, rows: Sequence[PlanRow] = ()) -> Iterator[Finding]:
    """All findings; `runs` is the folder of all runs, `store` the bucket prefix in use or empty, `rows` a plan."""
    for cloud in skypilot.CLOUDS:
        login = check_login(cloud)
        yield login
        if login[1] == "ok":
            yield check_clock(cloud)
    for row in rows:
        yield check_limit(row)
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


def check_clock(cloud: str, url: str = "", wall: Callable[[], float] = time.time) -> Finding:
    """This machine's clock agrees with the cloud's, as every answer of its tells it to the second."""
    name = f"clock {cloud}"
    url = url or (cloud == "aws" and os.environ.get("AWS_ENDPOINT_URL")) or CLOCKS[cloud]
    began = wall()
    try:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
                date = answer.headers["Date"]
        except urllib.error.HTTPError as error:  # refused, with the time of day
            date = error.headers["Date"]
        theirs_s = parsedate_to_datetime(date).timestamp()
    except (OSError, ValueError, TypeError) as error:
        return name, "warn", f"unknown: {url} does not tell the time ({error})", "see that it can be reached"
    # It was that time at some moment of that second, between question and answer.
    ahead_s = max(began - theirs_s - 1.0, 0.0) or min(wall() - theirs_s, 0.0)
    found = f"{abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}" if ahead_s else "agrees"
    verdict = "fail" if abs(ahead_s) >= REFUSED_S else "warn" if abs(ahead_s) >= NOTABLE_S else "ok"
    return name, verdict, found, "" if verdict == "ok" else "set the clock: timedatectl set-ntp true"


def check_limit(row: PlanRow, client: Callable[..., Any] | None = None) -> Finding:
    """The account may run what a row of a plan asks for; what runs there already is not counted."""
    name = f"limit {row.infra} {row.instance_type} {row.price_class.replace('_', '-')}"
    where = "see the quotas page of the cloud's console"
    if row.cloud != "aws":
        return name, "warn", f"unknown: {row.cloud} is not asked", where
    from spotlight.provision import aws

    try:
        code, vcpus = skypilot.quota_code(row.instance_type, row.price_class == "spot")
        if not code or not vcpus:
            return name, "warn", f"unknown: SkyPilot's catalog names no limit for {row.instance_type}", where
        limit = aws.vcpu_limit((client or aws.client)(row.region, service="service-quotas"), code)
    except SpotlightError as error:
        return name, "warn", f"unknown: {error.message[:160]}", where
    found = f"{limit:g} vCPUs allowed, {vcpus * row.nodes:g} planned ({code})"
    if limit < vcpus * row.nodes:
        return name, "fail", found, f"ask for more of {code} in Service Quotas, or plan less in {row.region}"
    return name, "ok", found, ""


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
