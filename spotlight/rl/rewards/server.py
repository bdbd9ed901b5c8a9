"""The other end of a remote reward: serves any reward over HTTP with JSON and base64 PNG.

Requests are checked before anything is decoded, scored one at a time, and answered with JSON whatever
happens. Beyond loopback a token is required.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from spotlight.errors import ConfigError, LockError
from spotlight.rl.rewards import Reward, sane
from spotlight.rl.rewards.remote import TOKEN_VARIABLE, decode_image

MAX_REQUEST_BYTES = 64_000_000
MAX_IMAGES = 64
READ_TIMEOUT_S = 30.0


class RewardServer(ThreadingHTTPServer):
    """`serve_forever()` and `shutdown()` as in the standard library; `url` is where to ask."""

    daemon_threads = True

    def __init__(
        self, reward: Reward, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None
    ) -> None:
        if not token and not _is_loopback(host):
            raise ConfigError(
                f"a reward server on {host} needs a token: anyone could use it", hint=f"set {TOKEN_VARIABLE}"
            )
        self.reward = reward
        self.token = token
        self.one_at_a_time = threading.Lock()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise LockError(f"cannot listen on {host}:{port} ({error.strerror or error})") from None

    @property
    def url(self) -> str:
        """The address for `reward.train`."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/score"


class _Refusal(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    timeout = READ_TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """`/health`."""
        if self.path == "/health":
            self._answer(HTTPStatus.OK, {"ok": True})
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": "GET /health or POST /score"})

    def do_POST(self) -> None:
        """`/score`."""
        try:
            self._authorise()
            status, reply = HTTPStatus.OK, self._score(_checked(self._body()))
        except _Refusal as refusal:
            status, reply = refusal.status, {"error": str(refusal)}
        except Exception as error:  # noqa: BLE001 - a reward's fault is the answer, not the server's end
            status, reply = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": repr(error)[:500]}
        self._answer(status, reply)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: prompts may be private."""

    def _authorise(self) -> None:
        wanted = self.server.token
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if wanted and not hmac.compare_digest(given.encode(), wanted.encode()):
            raise _Refusal(HTTPStatus.UNAUTHORIZED, "a wrong token or none")

    def _body(self) -> bytes:
        if self.path != "/score":
            raise _Refusal(HTTPStatus.NOT_FOUND, "POST /score")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        if int(length) > MAX_REQUEST_BYTES:
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MAX_REQUEST_BYTES} bytes")
        return self.rfile.read(int(length))

    def _score(self, request: tuple[Tensor, list[str], list[dict[str, Any]]]) -> dict[str, Any]:
        images, prompts, metadata = request
        with self.server.one_at_a_time:
            scores = self.server.reward.score(images, prompts, metadata)
        return {"scores": sane(scores.values, len(images)), "info": scores.info}

    def _answer(self, status: HTTPStatus, reply: dict[str, Any]) -> None:
        body = json.dumps(reply, default=str).encode()
        self.close_connection = True  # a refused body was not read; the next request would start inside it
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the client has gone
            pass


def _checked(body: bytes) -> tuple[Tensor, list[str], list[dict[str, Any]]]:
    """Images (B, C, H, W), prompts, metadata. Raises _Refusal."""
    try:
        request = json.loads(body)
        images, prompts, metadata = (request[key] for key in ("images", "prompts", "metadata"))
        if not 1 <= len(images) == len(prompts) == len(metadata) <= MAX_IMAGES:
            raise ValueError(f"1 to {MAX_IMAGES} images, with as many prompts and metadata")
        if not all(isinstance(p, str) for p in prompts) or not all(isinstance(m, dict) for m in metadata):
            raise ValueError("prompts are texts, metadata objects")
        return torch.stack([decode_image(image) for image in images]), prompts, metadata
    except (ValueError, KeyError, TypeError, RecursionError, RuntimeError) as error:
        raise _Refusal(HTTPStatus.BAD_REQUEST, f"bad request: {error!r}"[:500]) from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
