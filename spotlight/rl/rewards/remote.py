"""A reward behind HTTP, for models whose packages cannot live beside the runtime's.

POST to the URL with `{"images": [base64 PNG], "prompts": [...], "metadata": [...]}`; the answer is
`{"scores": [number or null], "info": {name: [...]}}`. `spotlight.rl.rewards.server` is the other end; any
server that speaks this will do. Pixels travel as 8 bits.

Whatever goes wrong, a server that is away, hangs, or answers with nonsense, ends in failed scores with the
reason beside them, after a deadline and a bounded number of tries.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from spotlight.errors import ConfigError
from spotlight.rl.rewards import Metadata, Scores, sane

TOKEN_VARIABLE = "SPOTLIGHT_REWARD_TOKEN"
IMAGES_PER_REQUEST = 8
MAX_ANSWER_BYTES = 1_000_000


class RemoteError(Exception):
    """One try failed; `final` when another would fail the same way."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class RemoteReward:
    """Scores by asking `url`; sends the token in SPOTLIGHT_REWARD_TOKEN if there is one."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        tries: int = 3,
        backoff_s: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._parts = _address(url)
        self._timeout_s, self._tries, self._backoff_s, self._sleep = timeout_s, tries, backoff_s, sleep

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """See `Reward.score`; `info["error"]` says why a score is missing, the rest is the server's."""
        values: list[float | None] = []
        columns: list[dict[str, list[Any]]] = []
        for start in range(0, len(images), IMAGES_PER_REQUEST):
            part = slice(start, start + IMAGES_PER_REQUEST)
            scores = self._score_part(images[part], prompts[part], metadata[part])
            values += scores.values
            columns.append(scores.info | {"": scores.values})
        return Scores(values, _joined(columns))

    def _score_part(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        finite = images.isfinite().flatten(1).all(dim=1).tolist()
        request = {
            "images": [encode_image(image) for image in images],
            "prompts": list(prompts),
            "metadata": [dict(row) for row in metadata],
        }
        try:
            scores = _read_answer(self._ask(json.dumps(request).encode()), len(images))
        except RemoteError as error:
            return Scores([None] * len(images), {"error": [str(error)] * len(images)})
        values = [value if ok else None for value, ok in zip(scores.values, finite, strict=True)]
        return Scores(values, scores.info)

    def _ask(self, body: bytes) -> bytes:
        for attempt in range(self._tries):
            try:
                return self._ask_once(body)
            except RemoteError as error:
                if error.final or attempt == self._tries - 1:
                    raise
                self._sleep(self._backoff_s * 2**attempt)
        raise RemoteError("no tries allowed")

    def _ask_once(self, body: bytes) -> bytes:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=self._timeout_s)
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        # A socket's own timeout starts anew with every byte; this one is for the whole exchange.
        expired = threading.Event()
        watchdog = threading.Timer(self._timeout_s, _cut, (connection, expired))
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.request("POST", self._parts.path or "/score", body, headers)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = expired.is_set() or isinstance(error, TimeoutError)
            raise RemoteError(
                f"no answer within {self._timeout_s:g} s" if late else repr(error)[:200]
            ) from None
        finally:
            watchdog.cancel()
            connection.close()
        if expired.is_set():
            raise RemoteError(f"no answer within {self._timeout_s:g} s")
        if response.status != http.client.OK:
            final = 400 <= response.status < 500 and response.status != http.client.TOO_MANY_REQUESTS
            raise RemoteError(f"HTTP {response.status}: {answer[:200].decode(errors='replace')}", final=final)
        if len(answer) > MAX_ANSWER_BYTES:
            raise RemoteError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes", final=True)
        return answer


def _address(url: str) -> SplitResult:
    if "@" in url:
        raise ConfigError(
            "a reward server's address must hold no password", hint=f"put it into {TOKEN_VARIABLE}"
        )
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0  # reading the port checks it
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"a reward server's address looks like http://host:port/score, not {url[:80]!r}")
    return parts


def encode_image(image: Tensor) -> str:
    """(1 or 3, H, W) in [0, 1] as base64 of a PNG."""
    pixels = (image.nan_to_num(0.0).float().cpu().clamp(0, 1) * 255).round().byte()
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy()).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def decode_image(text: str) -> Tensor:
    """Inverse of `encode_image`. Raises ValueError for what is no grey or RGB PNG, or one far too large."""
    try:
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]) as picture:
            if picture.mode not in ("L", "RGB"):
                raise ValueError(f"an image of mode {picture.mode}, not L or RGB")
            pixels = np.array(picture)
    except (OSError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no PNG ({str(error)[:100]})") from None
    channels_last = pixels[..., None] if pixels.ndim == 2 else pixels
    return torch.from_numpy(channels_last).permute(2, 0, 1).float() / 255


def _read_answer(answer: bytes, count: int) -> Scores:
    try:
        reply = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"the answer is no JSON ({str(error)[:100]})", final=True) from None
    scores = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        found = f"{len(scores)} scores" if isinstance(scores, list) else "no list of scores"
        raise RemoteError(f"{found} for {count} images", final=True)
    info = reply.get("info")
    columns = info.items() if isinstance(info, dict) else ()
    return Scores(
        sane(scores, count),
        {name: column for name, column in columns if isinstance(column, list) and len(column) == count},
    )


def _joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Columns of all parts one after the other, None where a part has no such column."""
    names = dict.fromkeys(name for part in parts for name in part if name)
    return {
        name: [entry for part in parts for entry in part.get(name, [None] * len(part[""]))] for name in names
    }


def _cut(connection: http.client.HTTPConnection, expired: threading.Event) -> None:
    expired.set()
    try:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it was over just then
        pass
