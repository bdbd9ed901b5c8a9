"""A run's small files, kept in its bucket by the head and fetched from there by whoever asks after the run.

What a run tells (progress, metrics, journal, pictures, summary) thus outlives its machines, and a look at it needs no
connection to any of them. One head writes; many may read.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from spotlight.errors import NotFoundError, SpotlightError
from spotlight.names import inside
from spotlight.store.objects import ObjectStore

PREFIX = "run"
EVERY_S = 2.0
LIVE = (
    "progress.jsonl",
    "metrics.jsonl",
    "summary.json",
)  # sent every time; the rest every tenth and at the end
FOLDERS = ("journal", "samples", "export", "logs", "tensorboard")
MAX_BYTES = 64 << 20
log = logging.getLogger(__name__)


class Mirror:
    """Sends what changed in `folder`, from a thread of its own, until `close`."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        self._folder, self._store = folder, store
        self._sent: dict[str, tuple[int, int]] = {}
        self._tags: dict[str, str] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="mirror")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Send everything a last time."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self.send(everything=True)

    def send(self, *, everything: bool) -> None:
        """Send files whose size or time changed. A bucket that does not answer is asked again next time."""
        names = list(LIVE)
        if everything:
            files = [path for name in FOLDERS for path in (self._folder / name).rglob("*")]
            names += [str(path.relative_to(self._folder)) for path in files if path.is_file()]
        for name in names:
            try:
                self._send(name)
            except (OSError, SpotlightError) as error:
                log.warning("mirror %s: %s", name, error)

    def _work(self) -> None:
        rounds = 0
        while not self._closing.wait(EVERY_S):
            self.send(everything=rounds % 10 == 0)
            rounds += 1

    def _send(self, name: str) -> None:
        path = self._folder / name
        if not path.is_file() or path.is_symlink():
            return
        about = path.stat()
        mark = about.st_size, about.st_mtime_ns
        if self._sent.get(name) == mark or about.st_size > MAX_BYTES:
            return
        self._put(f"{PREFIX}/{name}", path.read_bytes())
        self._sent[name] = mark

    def _put(self, key: str, data: bytes) -> None:
        """Create or replace: an earlier head of this run may have written it."""
        tag = self._store.put_if(key, data, self._tags[key]) if key in self._tags else None
        if tag is None:
            tag = self._store.put_new(key, data)
        if tag is None:
            tag = self._store.put_if(key, data, self._store.get(key).tag)
        if tag is not None:
            self._tags[key] = tag


def fetch(store: ObjectStore, folder: Path, *, everything: bool = False) -> list[str]:
    """Bring a run's files into `folder`; returns which changed. `everything`: pictures, journal and result too.

    A name that leads out of the folder is refused (UserError).
    """
    names = list(LIVE)
    if everything:
        names = [key.removeprefix(f"{PREFIX}/") for key in store.list_keys(PREFIX)]
    changed = []
    for name in names:
        path = inside(folder, name)
        try:
            data = store.get(f"{PREFIX}/{name}", limit_bytes=MAX_BYTES).data
        except NotFoundError:
            continue
        if path.is_file() and path.read_bytes() == data:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.partial")
        draft.write_bytes(data)
        draft.replace(path)
        changed.append(name)
    return changed
