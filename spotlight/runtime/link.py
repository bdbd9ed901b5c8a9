"""Frames over a stream socket between a gang and its ranks: a JSON head, and tensors as safetensors.

Nothing that arrives can run code, sizes are bounded before memory is taken, and a peer that does not keep to
the format is a ConnectionError like one that hung up.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spotlight.errors import IntegrityError
from spotlight.store.tensors import pack, unpack

_SIZES = struct.Struct("!IQ")
_HEAD_LIMIT_BYTES = 1 << 20
_BODY_LIMIT_BYTES = 64 << 30

Head = dict[str, Any]
Frame = tuple[Head, dict[str, Tensor]]


def encode(head: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """One frame, ready to be sent to any number of links."""
    text = json.dumps(head).encode()
    body = pack(tensors) if tensors else b""
    return _SIZES.pack(len(text), len(body)) + text + body


class Link:
    """One end of a connection. Any thread may send; one thread reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self.body_limit_bytes = _BODY_LIMIT_BYTES
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A machine that vanishes sends no farewell: a rank must still notice that its gang is gone.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    @property
    def local_address(self) -> str:
        """The address of this machine that the peer reaches, e.g. '10.1.2.3'."""
        return str(self._sock.getsockname()[0])

    def set_timeout(self, seconds: float | None) -> None:
        """Longest time one read or write may block; beyond it, a ConnectionError."""
        self._sock.settimeout(seconds)

    def send(self, head: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send one frame. ConnectionError if the peer is gone or takes nothing."""
        self.send_bytes(encode(head, tensors))

    def send_bytes(self, frame: bytes) -> None:
        """Send what `encode` made."""
        with self._sending:
            try:
                self._sock.sendall(frame)
            except OSError as error:
                raise ConnectionError(f"peer does not take data: {error}") from error

    def read(self) -> list[Frame]:
        """Wait for some data and return the frames that are complete by then, perhaps none."""
        try:
            data = self._sock.recv(1 << 20)
        except OSError as error:
            raise ConnectionError(f"peer is gone: {error}") from error
        if not data:
            raise ConnectionError("peer hung up")
        self._buffer += data
        frames = []
        while (frame := self._take()) is not None:
            frames.append(frame)
        return frames

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def _take(self) -> Frame | None:
        if len(self._buffer) < _SIZES.size:
            return None
        head_bytes, body_bytes = _SIZES.unpack_from(self._buffer)
        if head_bytes > _HEAD_LIMIT_BYTES or body_bytes > self.body_limit_bytes:
            raise ConnectionError(f"peer announces a frame of {head_bytes} + {body_bytes} bytes")
        end = _SIZES.size + head_bytes + body_bytes
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[_SIZES.size : _SIZES.size + head_bytes])
        body = bytes(self._buffer[_SIZES.size + head_bytes : end])
        del self._buffer[:end]
        try:
            head = json.loads(text)
            if not isinstance(head, dict) or not isinstance(head.get("op"), str):
                raise ValueError("no op")
            return head, unpack(body, finite=False, limit_bytes=_BODY_LIMIT_BYTES) if body else {}
        except (ValueError, RecursionError, IntegrityError) as error:
            raise ConnectionError(f"peer sent a broken frame: {str(error)[:100]}") from error
