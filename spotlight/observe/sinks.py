"""Where metrics go besides `metrics.jsonl`: TensorBoard and W&B, neither of which can hold up a run.

A sink lives behind `Background`: its own daemon thread, a bounded queue that drops the oldest record, errors
counted and kept. A sink that hangs is left behind at the end, after a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

_ERRORS_BEFORE_GIVING_UP = 3


class Sink(Protocol):
    """Takes flat records (`at_s`, `kind`, `iteration`, numbers). May raise and may be slow."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go; may take as long as it likes."""

    def abandon(self) -> None:
        """Called from another thread when the deadline has passed: leave no process behind, do not wait."""


class Background:
    """Feeds a sink from its own thread, so that whoever writes never waits and never sees an error."""

    def __init__(self, name: str, make: Callable[[], Sink], capacity: int = 1024) -> None:
        """`make` runs in the thread: even opening a sink may hang."""
        self.name = name
        self.dropped = 0
        self.errors = 0
        self.problem: str | None = None
        self._make = make
        self._sink: Sink | None = None
        self._queue: deque[Mapping[str, Any]] = deque()
        self._capacity = capacity
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Offer one record; when the queue is full the oldest one goes, counted."""
        with self._changed:
            if len(self._queue) >= self._capacity:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append(record)
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Wait at most `timeout_s` for what is queued; return what went wrong, in words."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        problems = []
        if self._thread.is_alive():
            if self._sink is not None:
                self._guard(self._sink.abandon)
            problems.append(f"{self.name}: still busy after {timeout_s:g} s, left behind")
        if self.dropped:
            problems.append(f"{self.name}: {self.dropped} records dropped")
        if self.problem:
            problems.append(f"{self.name}: {self.problem}")
        return problems

    def _run(self) -> None:
        self._sink = sink = self._guard(self._make)
        while (record := self._next()) is not None:
            if sink is not None and self.errors < _ERRORS_BEFORE_GIVING_UP:
                self._guard(partial(sink.write, record))
            else:
                self.dropped += 1
        if sink is not None:
            self._guard(sink.close)

    def _next(self) -> Mapping[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue.popleft() if self._queue else None

    def _guard(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - a third party's sink must never reach the run
            self.errors += 1
            self.problem = self.problem or f"{type(error).__name__}: {error}"[:300]
            return None


class TensorBoardSink:
    """Scalars as TensorBoard event records, written without torch or TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # The name TensorBoard looks for; the process id keeps a resumed run in a file of its own.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("ab"))
        self._put(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write every number of the record as a scalar named `kind/name` at step `iteration`."""
        kind = str(record["kind"])
        values = [
            self._summary.Value(tag=f"{kind}/{name}", simple_value=float(value))
            for name, value in numbers(record).items()
        ]
        if values:
            self._put(
                self._event(
                    wall_time=float(record["at_s"]),
                    step=int(record["iteration"]),
                    summary=self._summary(value=values),
                )
            )

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def abandon(self) -> None:
        """Nothing to leave behind: a file handle ends with the process."""

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class WandbSink:
    """W&B in a child process fed by a pipe.

    A process of its own because W&B's exit hook waits for the network: the child can be killed, a thread
    cannot. Its standard input is the pipe, so it can never ask a question; without a key it stays offline.
    """

    def __init__(
        self, folder: Path, project: str, run: str, config: Mapping[str, Any], finish_s: float = 4.0
    ) -> None:
        self._finish_s = finish_s
        self._child = subprocess.Popen(
            [sys.executable, "-m", "spotlight.observe.wandb_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "WANDB_SILENT": "true"},
            start_new_session=True,  # Ctrl-C is for the run; the child ends with its pipe
        )
        self._send({"dir": str(folder), "project": project, "name": run, "config": config})

    def write(self, record: Mapping[str, Any]) -> None:
        """Send one record. Raises BrokenPipeError when the child has ended."""
        kind, step = record["kind"], record["iteration"]
        self._send({"step": step, "values": {f"{kind}/{k}": v for k, v in numbers(record).items()}})

    def close(self) -> None:
        """Let the child finish within its time, then end it."""
        with contextlib.suppress(OSError):
            if self._child.stdin:
                self._child.stdin.close()
        try:
            self._child.wait(self._finish_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.returncode:
            raise RuntimeError(
                _CHILD_ENDS.get(self._child.returncode, f"ended with {self._child.returncode}")
            )

    def abandon(self) -> None:
        """End the child at once; whatever blocks on its pipe returns."""
        self._child.kill()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()


_CHILD_ENDS = {
    3: "the wandb package is not installed; add the extra `wandb`",
    -9: "did not finish in time and was ended; `wandb sync` sends what is on disk",
}


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record, without its time stamp, kind and step."""
    return {
        name: float(value)
        for name, value in record.items()
        if name not in ("at_s", "kind", "iteration") and isinstance(value, (int, float))
    }
