"""What the doctor finds out about the cloud side."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from fakes.fake_account import LAUNCH

from spotlight.errors import CredentialError
from spotlight.provision import health, skypilot


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
