"""The instance metadata services of AWS, GCP and Azure, as far as interruption notices go. Standard library only.

    python metadata_server.py --address 169.254.169.254 --port 80 --state FILE     one node of the cloud in a box

What stands is in a JSON file that the test writes: {"action": ..., "rebalance": ..., "preempted": ..., "events": [...],
"status": 503 (answer everything so)}. Tokens of AWS expire when the state has a new "token_epoch".
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

LONG_POLL_S = 30.0
ROLE = "box"


def state(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


class Handler(BaseHTTPRequestHandler):
    """Answers as the clouds document it: 401 without a fresh token, 403 and 400 without the header."""

    path_of_state: Path
    requests: list[str]
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.requests.append(f"PUT {self.path}")
        now = state(self.path_of_state)
        if self.path != "/latest/api/token" or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
            return self.reply(400)
        return self.reply(200, f"token-{now.get('token_epoch', 0)}")

    def do_GET(self) -> None:
        self.requests.append(f"GET {self.path}")
        now = state(self.path_of_state)
        if now.get("status"):
            return self.reply(now["status"])
        url = urlsplit(self.path)
        if url.path.startswith("/latest/"):
            return self.aws(url.path.removeprefix("/latest/meta-data/"), now)
        if url.path.startswith("/computeMetadata/v1/"):
            return self.gcp(url.path, parse_qs(url.query))
        if url.path == "/metadata/scheduledevents":
            return self.azure(parse_qs(url.query), now)
        return self.reply(404)

    def aws(self, name: str, now: dict) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != f"token-{now.get('token_epoch', 0)}":
            return self.reply(401)
        if name == "spot/instance-action" and now.get("action"):
            return self.reply(200, json.dumps(now["action"]))
        if name == "events/recommendations/rebalance" and now.get("rebalance"):
            return self.reply(200, json.dumps(now["rebalance"]))
        if name == "iam/security-credentials/":
            return self.reply(200, ROLE)
        if name == f"iam/security-credentials/{ROLE}":
            return self.reply(200, json.dumps(self.login()))
        return self.reply(404)

    def login(self) -> dict[str, str]:
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
        login = {"AccessKeyId": "box", "SecretAccessKey": "box", "Token": "box", "Expiration": expires}
        return {"Code": "Success", "Type": "AWS-HMAC", **login}

    def gcp(self, path: str, query: dict[str, list[str]]) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            return self.reply(403)
        if path != "/computeMetadata/v1/instance/preempted":
            return self.reply(404)
        wait_s = float(query.get("timeout_sec", [str(LONG_POLL_S)])[0])
        end = time.monotonic() + (wait_s if query.get("wait_for_change") == ["true"] else 0)
        last = query.get("last_etag", [""])[0]
        while True:
            value = "TRUE" if state(self.path_of_state).get("preempted") else "FALSE"
            if value != last or time.monotonic() >= end:
                return self.reply(200, value, ETag=value)
            time.sleep(0.01)

    def azure(self, query: dict[str, list[str]], now: dict) -> None:
        if self.headers.get("Metadata") != "true" or "api-version" not in query:
            return self.reply(400)
        body = {"DocumentIncarnation": 1, "Events": now.get("events", [])}
        return self.reply(200, json.dumps(body))

    def reply(self, status: int, text: str = "", **headers: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


class MetadataServer:
    """A running server: `url`, `say(action=...)`, `requests`."""

    def __init__(self, path: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        self._path = path
        self.requests: list[str] = []
        handler = type("Bound", (Handler,), {"path_of_state": path, "requests": self.requests})
        self._server = ThreadingHTTPServer((address, port), handler)
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def say(self, **what: object) -> None:
        """What stands from now on; None takes it back."""
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps({**state(self._path), **what}))
        draft.replace(self._path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--state", type=Path, required=True)
    args = parser.parse_args()
    MetadataServer(args.state, args.address, args.port)
    threading.Event().wait()


if __name__ == "__main__":
    main()
