"""Which ranks of a gang are up: their connections, their answers, their silence.

A rank is a member from the moment it is asked for until it is lost: its connection ended, it was silent for
`dead_after_s`, or the gang gave it up. Lost ranks are killed and never come back; a replacement is a new one.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spotlight.core.types import Gpu
from spotlight.errors import SpotlightError
from spotlight.runtime.link import Frame, Head, Link, encode
from spotlight.runtime.zygote import Invitation

_GUEST_S = 10.0  # a connection that has not introduced itself by then is closed


class Spawner(Protocol):
    """Starts and kills ranks on one node: a `Zygote`, or whatever reaches one on another machine."""

    def spawn(self, invitation: Invitation, device: str = "cpu") -> int:
        """Start a rank that connects to the inviting gang; its process id."""
        ...

    def kill(self, pid: int) -> None:
        """Make sure that it ends; one that has ended is fine."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """The clocks of a gang, in seconds."""

    heartbeat_s: float = 1.0
    dead_after_s: float = 3.0
    form_timeout_s: float = 3.0
    op_timeout_s: float = 30.0
    start_timeout_s: float = 120.0
    """A rank that was asked for and has not joined by then is lost."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s <= self.dead_after_s / 2:
            raise ValueError("dead_after_s must be at least two heartbeats")


@dataclass(eq=False, slots=True)
class Member:
    """One rank. `answer` is its reply to the command sent last, `pending` whether one is owed."""

    gpu: Gpu
    token: str
    pid: int
    heard_at: float
    link: Link | None = None
    ready: bool = False
    holds_weights: bool = False
    pending: bool = False
    answer: Frame | None = None

    def __str__(self) -> str:
        return f"{self.gpu.node}/{self.gpu.index}"


class Roster:
    """The members, and one event loop turn at a time (`pump`)."""

    def __init__(self, spawners: Mapping[str, Spawner], timing: Timing, address: str) -> None:
        self.members: list[Member] = []
        self.losses: list[tuple[float, str]] = []
        """When and why members were lost, oldest first; the gang empties it."""
        self.epoch = 0
        self.stale_replies = 0
        self._spawners, self._timing, self._address = spawners, timing, address
        self._pinged_at = 0.0
        self._guests: dict[Link, float] = {}
        self._listener = socket.create_server((address, 0), backlog=64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    @property
    def ready(self) -> list[Member]:
        """Members whose rank is up."""
        return [member for member in self.members if member.ready]

    def add(self, gpu: Gpu, device: str) -> None:
        """Ask for a rank on `gpu`. ValueError if it has one; RunError if its node cannot start one."""
        if any(member.gpu == gpu for member in self.members):
            raise ValueError(f"{gpu} has a rank already")
        token = secrets.token_hex(16)
        invitation = Invitation(self._address, self._listener.getsockname()[1], token)
        pid = self._spawners[gpu.node].spawn(invitation, device)
        self.members.append(Member(gpu, token, pid, time.monotonic()))

    def send(self, member: Member, frame: bytes) -> None:
        """Send a command that gets no answer (see `ask`); a member that does not take it is lost."""
        if member in self.members and member.link is not None:
            try:
                member.link.send_bytes(frame)
            except ConnectionError as error:
                self.lose(member, str(error))

    def ask(self, member: Member, frame: bytes) -> None:
        """Send a command whose answer will be in `member.answer`."""
        member.answer, member.pending = None, True
        self.send(member, frame)

    def lose(self, member: Member, reason: str) -> None:
        """Forget a member and make sure that its process ends."""
        self.losses.append((time.monotonic(), f"{member}: {reason}"))
        self.members.remove(member)
        if member.link is not None:
            self._selector.unregister(member.link)
            member.link.close()
        with contextlib.suppress(SpotlightError, OSError):  # its whole node may be gone
            self._spawners[member.gpu.node].kill(member.pid)

    def forgive(self) -> None:
        """After a pause in which nobody pumped, nobody is to blame for silence."""
        now = time.monotonic()
        if now - self._pinged_at > 2 * self._timing.heartbeat_s:
            for member in self.ready:
                member.heard_at = now

    def pump(self, wait: bool = True) -> None:
        """One turn: replies, newcomers, hang-ups, heartbeats. Blocks for a quarter heartbeat at most."""
        for key, _ in self._selector.select(self._timing.heartbeat_s / 4 if wait else 0):
            if key.data is None:
                self._accept()
            elif isinstance(key.data, Member):
                self._read(key.data)
            else:
                self._introduce(key.data)
        self._check_silence(time.monotonic())

    def close(self) -> None:
        """End all ranks and connections."""
        for member in list(self.members):
            self.lose(member, "the gang was closed")
        for link in list(self._guests):
            self._show_out(link)
        self._selector.close()
        self._listener.close()

    def _check_silence(self, now: float) -> None:
        if now - self._pinged_at >= self._timing.heartbeat_s:
            self._pinged_at = now
            for member in self.ready:
                self.send(member, encode({"op": "ping"}))
        for member in list(self.members):
            allowed = self._timing.dead_after_s if member.ready else self._timing.start_timeout_s
            if now - member.heard_at > allowed:
                self.lose(member, f"silent for {allowed:g} s")
        for link, since in list(self._guests.items()):
            if now - since > _GUEST_S:
                self._show_out(link)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        link = Link(sock)
        link.body_limit_bytes = 0  # a stranger may introduce itself, no more
        link.set_timeout(self._timing.dead_after_s)
        self._guests[link] = time.monotonic()
        self._selector.register(link, selectors.EVENT_READ, link)

    def _introduce(self, link: Link) -> None:
        """The first frame of a connection carries the token of the member that it is, or is the last."""
        try:
            frames = link.read()
        except ConnectionError:
            self._show_out(link)
            return
        if not frames:
            return
        token = str(frames[0][0].get("token")).encode()
        absent = [m for m in self.members if m.link is None]
        member = next((m for m in absent if hmac.compare_digest(m.token.encode(), token)), None)
        if member is None:
            self._show_out(link)
            return
        del self._guests[link]
        self._selector.modify(link, selectors.EVENT_READ, member)
        link.body_limit_bytes = 4 << 30
        member.link = link
        for frame in frames[1:]:
            self._take(member, *frame)

    def _show_out(self, link: Link) -> None:
        del self._guests[link]
        self._selector.unregister(link)
        link.close()

    def _read(self, member: Member) -> None:
        if member not in self.members or member.link is None:
            return  # lost earlier in this turn
        try:
            for frame in member.link.read():
                self._take(member, *frame)
        except ConnectionError as error:
            self.lose(member, str(error))

    def _take(self, member: Member, head: Head, tensors: dict[str, Tensor]) -> None:
        member.heard_at = time.monotonic()
        if head["op"] == "ready":
            member.ready = True
        elif head["op"] in ("done", "failed"):
            if head.get("epoch") == self.epoch:
                member.answer, member.pending = (head, tensors), False
            else:
                self.stale_replies += 1
