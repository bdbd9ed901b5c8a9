"""Where interruption notices come from: the node's own metadata service, in the shape of its cloud, or a file.

A notice is never counted on: it may come 120 s ahead (AWS), 30 s (GCP, Azure) or not at all, may be withdrawn, and
the service may be slow, refuse or be switched off. No answer is no notice.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Interruption:
    """The node will be taken in `deadline_s` seconds, says `source`."""

    deadline_s: float
    source: str


class NoticeSource(Protocol):
    """Answers at once; None while nothing is announced. Never raises: no answer is no notice."""

    def poll(self) -> Interruption | None:
        """The notice that stands now, if any."""
        ...


class FileNotice:
    """A file holding {"deadline_s": number}: for bare metal, local runs and tests. Removed: withdrawn."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self) -> Interruption | None:
        """The file's notice; an unreadable file means that something is up, and leaves no time."""
        try:
            text = self._path.read_text()
        except OSError:
            return None
        try:
            deadline_s = float(json.loads(text)["deadline_s"])
        except (ValueError, KeyError, TypeError):
            deadline_s = 0.0
        return Interruption(max(deadline_s, 0.0), "file")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of a metadata service; status 0: none came."""

    status: int
    text: str = ""


def ask(url: str, headers: Mapping[str, str], *, method: str = "GET", timeout_s: float = 2.0) -> Reply:
    """One request, straight to this host's metadata service: no proxy, no redirect elsewhere. Never raises."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return Reply(answer.status, answer.read(65_536).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        return Reply(error.code)
    except (OSError, ValueError):
        return Reply(0)


class AwsNotice:
    """EC2's IMDSv2: `spot/instance-action` is 404 until there is one. A stale token is answered 401."""

    source = "aws"

    def __init__(
        self, base_url: str = "http://169.254.169.254", wall: Callable[[], float] = time.time
    ) -> None:
        self._base, self._wall = base_url, wall
        self._token = ""

    def poll(self) -> Interruption | None:
        """The interruption EC2 announces. A rebalance recommendation is no notice: nothing need follow it."""
        reply = self._get("spot/instance-action")
        if reply.status != 200:
            return None
        action = _mapping(reply.text)
        if action.get("action") not in ("terminate", "stop", "hibernate"):
            return None
        return Interruption(
            _seconds_to(action.get("time"), self._wall(), datetime.fromisoformat), self.source
        )

    def _get(self, name: str) -> Reply:
        for _ in range(2):
            reply = ask(f"{self._base}/latest/meta-data/{name}", {"X-aws-ec2-metadata-token": self._token})
            if reply.status != 401:
                return reply
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "3600"}
            self._token = ask(f"{self._base}/latest/api/token", ttl, method="PUT").text
        return reply


class GcpNotice:
    """Compute Engine's `instance/preempted`, held open until it changes: the notice is seen at once."""

    source = "gcp"
    LEAD_S = 30.0

    def __init__(self, base_url: str = "http://metadata.google.internal", hold_s: float = 20.0) -> None:
        self._base, self._hold_s = base_url, hold_s

    def poll(self) -> Interruption | None:
        """Blocks up to `hold_s`. The service gives no time: Google promises up to 30 s."""
        query = f"wait_for_change=true&last_etag=FALSE&timeout_sec={self._hold_s:g}"
        url = f"{self._base}/computeMetadata/v1/instance/preempted?{query}"
        reply = ask(url, {"Metadata-Flavor": "Google"}, timeout_s=self._hold_s + 5)
        return Interruption(self.LEAD_S, self.source) if reply.text.strip() == "TRUE" else None


class AzureNotice:
    """Azure's Scheduled Events, of which `Preempt` gives at least 30 s. `name` is this machine's; empty: any."""

    source = "azure"
    LEAD_S = 30.0

    def __init__(
        self,
        base_url: str = "http://169.254.169.254",
        name: str = "",
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._base, self._name, self._wall = base_url, name, wall

    def poll(self) -> Interruption | None:
        """The first preemption that names this machine."""
        url = f"{self._base}/metadata/scheduledevents?api-version=2020-07-01"
        events = _mapping(ask(url, {"Metadata": "true"}).text).get("Events")
        for event in events if isinstance(events, list) else ():
            if isinstance(event, dict) and event.get("EventType") == "Preempt" and self._is_mine(event):
                begun = not event.get("NotBefore")  # empty once the event has started
                lead_s = (
                    0.0 if begun else _seconds_to(event["NotBefore"], self._wall(), parsedate_to_datetime)
                )
                return Interruption(lead_s, self.source)
        return None

    def _is_mine(self, event: Mapping[str, Any]) -> bool:
        return not self._name or self._name in (event.get("Resources") or ())


class Background:
    """Asks a slow source from a thread of its own, so that `poll` answers at once.

    A standing notice keeps the deadline that it was first seen with: news only when something changes.
    """

    def __init__(self, source: NoticeSource, every_s: float = 2.0) -> None:
        self._source, self._every_s = source, every_s
        self._standing: tuple[Interruption, float] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._ask, daemon=True, name="notices").start()

    def poll(self) -> Interruption | None:
        """What stood when the source was last asked."""
        standing = self._standing
        return standing[0] if standing else None

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _ask(self) -> None:
        while not self._closed.is_set():
            found, now, before = self._source.poll(), time.monotonic(), self._standing
            if found is None:
                self._standing = None
            elif before is None or abs(now + found.deadline_s - before[1]) > _NEW_DEADLINE_S:
                self._standing = found, now + found.deadline_s
            self._closed.wait(self._every_s)


def cloud_source(environ: Mapping[str, str]) -> list[NoticeSource]:
    """The source of this node's cloud: SPOTLIGHT_CLOUD names it, SPOTLIGHT_METADATA_URL replaces its address."""
    kinds: dict[str, Any] = {"aws": AwsNotice, "gcp": GcpNotice, "azure": AzureNotice}
    kind = kinds.get(environ.get("SPOTLIGHT_CLOUD", ""))
    if kind is None:
        return []
    url = environ.get("SPOTLIGHT_METADATA_URL")
    return [Background(kind(url) if url else kind())]


_NEW_DEADLINE_S = 5.0  # clocks and rounding move a deadline by less


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _seconds_to(text: Any, now_s: float, parse: Callable[[str], datetime]) -> float:
    """Seconds from `now_s` (UTC) to a time in words, at least 0; a time that cannot be read leaves none."""
    try:
        at = parse(str(text))
    except ValueError:
        return 0.0
    return max((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now_s, 0.0)


def announce(path: Path, deadline_s: float) -> None:
    """Write a notice file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".partial")
    draft.write_text(json.dumps({"deadline_s": deadline_s}))
    draft.replace(path)


class Watch:
    """Turns polls into news: each notice once, its withdrawal once."""

    def __init__(self, sources: list[NoticeSource]) -> None:
        self._sources = sources
        self._standing: Interruption | None = None

    def news(self) -> tuple[Interruption | None, bool]:
        """(a new notice or None, whether an earlier one was withdrawn)."""
        found = [notice for source in self._sources if (notice := source.poll())]
        first = min(found, key=lambda notice: notice.deadline_s, default=None)
        before, self._standing = self._standing, first
        if first is not None and first != before:
            return first, False
        return None, first is None and before is not None
