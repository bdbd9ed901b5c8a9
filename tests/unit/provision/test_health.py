"""What the doctor finds out about the cloud side."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from botocore.stub import Stubber
from fakes.fake_account import LAUNCH

from spotlight.core.capacity import PlanRow
from spotlight.errors import CredentialError
from spotlight.provision import aws, health, skypilot


class Living:
    """A region in which these runs have machines."""

    def __init__(self, *runs: str) -> None:
        self._runs = set(runs)

    def runs(self) -> set[str]:
        return self._runs


def findings(runs: Path, *living: str) -> list[tuple[str, str, str]]:
    return [finding[:3] for finding in health.check_machines(runs, lambda cloud, region: Living(*living))]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "demo").mkdir()
    LAUNCH.save(tmp_path / "demo")
    return tmp_path


def test_machines_of_a_run_that_stands_are_well(runs: Path) -> None:
    assert findings(runs, "demo") == [("machines aws/us-east-1", "ok", "1 runs have machines")]


def test_machines_of_a_run_that_was_taken_down_are_nobodys(runs: Path) -> None:
    (runs / "demo" / "down").touch()
    assert findings(runs, "demo")[0][1:] == ("fail", "nobody's: demo")
    assert findings(runs, "stranger")[0][1:] == ("fail", "nobody's: stranger")
    assert findings(runs)[0][1] == "ok"


def test_a_launch_that_cannot_be_read_is_named_and_hides_no_other(runs: Path) -> None:
    (runs / "broken").mkdir()
    (runs / "broken" / "launch.json").write_text("{")
    assert [verdict for _, verdict, _ in findings(runs, "demo")] == ["warn", "ok"]


def test_a_bucket_is_tried_out_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    assert health.check_bucket(str(tmp_path / "bucket"))[1] == "ok"
    assert [path.name for path in (tmp_path / "bucket").rglob("*") if path.is_file()] in ([], [".lock"])
    assert health.check_bucket("")[1] == "warn"
    assert health.check_bucket("s3://x")[1] == "fail"


def test_a_missing_login_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(cloud: str) -> list[str]:
        raise CredentialError(f"no cloud login found\n{cloud}: no key", hint="sky check")

    monkeypatch.setattr(skypilot, "enabled_clouds", refuse)
    assert health.check_login("aws") == ("login aws", "warn", "aws: no key", "sky check")


class Health(BaseHTTPRequestHandler):
    body = b'{"status": "healthy"}'
    date = "Mon, 02 Mar 2026 12:00:00 GMT"

    def do_HEAD(self) -> None:
        self.send_response_only(403)  # not for us; the time of day all the same
        if self.date:
            self.send_header("Date", self.date)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        return


class Stranger(Health):
    body = b"<html>"


@pytest.mark.parametrize(("handler", "verdict"), [(Health, "ok"), (Stranger, "fail")])
def test_the_port_is_skypilots_or_another_programs(handler: type[Health], verdict: str) -> None:
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    assert health.check_port(server.server_port)[1] == verdict
    server.shutdown()
    server.server_close()


def test_a_free_port_is_well() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert health.check_port(probe.getsockname()[1])[1] == "ok"


NOON_S = datetime(2026, 3, 2, 12, tzinfo=UTC).timestamp()


class Timeless(Health):
    date = ""


@pytest.mark.parametrize(
    ("handler", "ahead_s", "verdict", "found"),
    [
        (Health, 0.0, "ok", "agrees"),
        (Health, 0.9, "ok", "agrees"),
        (Health, 31.0, "warn", "30 s ahead"),
        (Health, -30.0, "warn", "30 s behind"),
        (Health, -301.0, "fail", "301 s behind"),
        (Health, 3600.0, "fail", "3599 s ahead"),
        (Timeless, 0.0, "warn", "unknown"),
    ],
)
def test_the_clock_is_compared_with_the_clouds(
    handler: type[Health], ahead_s: float, verdict: str, found: str
) -> None:
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    finding = health.check_clock("aws", url, wall=lambda: NOON_S + ahead_s)
    assert finding[:2] == ("clock aws", verdict)
    assert finding[2].startswith(found)
    server.shutdown()
    server.server_close()


def test_a_cloud_that_cannot_be_reached_leaves_the_clock_unknown() -> None:
    assert health.check_clock("gcp", "http://127.0.0.1:9")[1:3] == (
        "warn", "unknown: http://127.0.0.1:9 does not tell the time (<urlopen error [Errno 111] Connection refused>)"
    )  # fmt: skip


SPOT = replace(LAUNCH.rows[1], nodes=3)


def limit(monkeypatch: pytest.MonkeyPatch, row: PlanRow, allowed: float | None) -> tuple[str, str, str, str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    monkeypatch.setattr(
        skypilot,
        "quota_code",
        lambda kind, spot: ("L-SPOT" if spot else "L-FULL", 192.0) if kind[0] == "p" else ("", 0.0),
    )
    quotas = aws.client("us-east-1", service="service-quotas")
    asked = {"ServiceCode": "ec2", "QuotaCode": "L-SPOT" if row.price_class == "spot" else "L-FULL"}
    with Stubber(quotas) as stub:
        if allowed is None:
            stub.add_client_error("get_service_quota", service_error_code="AccessDeniedException")
        else:
            stub.add_response("get_service_quota", {"Quota": {"Value": allowed}}, asked)
        return health.check_limit(row, lambda region, service: quotas)


def test_a_plan_within_the_limit_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit(monkeypatch, SPOT, 576)[1:3] == ("ok", "576 vCPUs allowed, 576 planned (L-SPOT)")
    assert limit(monkeypatch, LAUNCH.rows[0], 1e4)[0] == "limit aws/us-east-1 p5.48xlarge on-demand"


def test_a_plan_beyond_the_limit_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    name, verdict, found, fix = limit(monkeypatch, SPOT, 0)
    assert (name, verdict) == ("limit aws/us-east-1 p5.48xlarge spot", "fail")
    assert found.startswith("0 vCPUs allowed, 576 planned")
    assert "L-SPOT" in fix


@pytest.mark.parametrize(
    ("row", "allowed"),
    [(SPOT, None), (replace(SPOT, instance_type="x1"), 5), (replace(SPOT, cloud="gcp"), 5)],
)
def test_a_limit_that_cannot_be_asked_is_unknown(
    monkeypatch: pytest.MonkeyPatch, row: PlanRow, allowed: float | None
) -> None:
    assert limit(monkeypatch, row, allowed)[1] == "warn"
    assert limit(monkeypatch, row, allowed)[2].startswith("unknown: ")
