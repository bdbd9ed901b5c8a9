"""The story of a run as a person is told it: a few kinds of event, kept in a file, folded into a state.

The same events drive the live view, the plain lines, `spotlight status`, `logs` and `report`, so that none of
them can tell another story. An event is a flat dict with `kind`, `at_s` (Unix time) and:

    run_started    run, recipe, iterations, and what else is known: algorithm, model, device
    node           node, state = joining | ready | notice | lost | back, why, role, price_class
    phase          iteration, phase = explore | roll_out | score | train | publish | eval
    iteration      iteration, just finished, and the numbers of `spotlight.observe.metrics.METRICS`
    eval           iteration, score, exact
    checkpoint     iteration, path
    grid           iteration, path (PNG, relative to the run folder)
    warning        text
    run_finished   summary: the content of summary.json
    run_failed     code, message, hint

Iterations are numbered from 0. What is measured on weights (eval, checkpoint, grid) bears the number of
iterations that made them: 0 is the base model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotlight.observe import jsonl, words
from spotlight.observe.redact import Redactor

FILE_NAME = "progress.jsonl"
KINDS = (
    "run_started",
    "node",
    "phase",
    "iteration",
    "eval",
    "checkpoint",
    "grid",
    "warning",
    "run_finished",
    "run_failed",
)
PHASES = ("explore", "roll_out", "score", "train", "publish", "eval")
NODE_STATES = ("joining", "ready", "notice", "lost", "back")
_GONE = ("lost", "ended")


@dataclass(slots=True)
class NodeProgress:
    """What is known of one node; a lost one stays listed, with its reason."""

    node: str
    role: str = ""
    price_class: str = ""
    state: str = "joining"
    why: str = ""
    since_s: float = 0.0

    @property
    def gone(self) -> bool:
        """Whether it does no work now."""
        return self.state in _GONE


@dataclass(slots=True)
class Progress:
    """The state of a run after the events folded so far."""

    run: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    iterations: int = 0
    iterations_done: int = 0
    phase: str = ""
    started_s: float | None = None
    updated_s: float | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    numbers_s: float | None = None
    rewards: list[tuple[int, float]] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    scored_s: float | None = None
    nodes: dict[str, NodeProgress] = field(default_factory=dict)
    node_events: list[dict[str, Any]] = field(default_factory=list)
    grids: list[tuple[int, str]] = field(default_factory=list)
    checkpoint: int | None = None
    checkpoint_s: float | None = None
    warnings: list[str] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        """Fold one event in. Unknown kinds and missing fields are passed over: an old log still reads."""
        at_s = _number(event.get("at_s"))
        if at_s is not None:
            self.updated_s = at_s if self.updated_s is None else max(self.updated_s, at_s)
        handler = _HANDLERS.get(str(event.get("kind")))
        if handler is not None:
            handler(self, event, at_s if at_s is not None else (self.updated_s or 0.0))

    @property
    def ended(self) -> bool:
        """Whether the run has come to an end, good or bad."""
        return self.summary is not None or self.failure is not None

    @property
    def preemptions(self) -> int:
        """How often a provider took a node so far; one that broke is lost too, but no preemption."""
        return sum(e.get("state") == "lost" and bool(e.get("interrupted", True)) for e in self.node_events)


def _started(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    # A resumed run starts again: what was learned stays, who was there does not.
    state.run = str(event.get("run") or state.run)
    state.iterations = _count(event.get("iterations"), state.iterations)
    state.facts = {key: value for key, value in event.items() if key not in ("kind", "at_s")}
    state.started_s = at_s if state.started_s is None else state.started_s
    state.nodes.clear()
    state.summary = state.failure = None


def _node(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    name = str(event.get("node") or "?")
    node = state.nodes.setdefault(name, NodeProgress(name))
    node.role = str(event.get("role") or node.role)
    node.price_class = str(event.get("price_class") or node.price_class)
    node.state = str(event.get("state") or node.state)
    node.why = str(event.get("why") or "")
    node.since_s = at_s
    state.node_events.append({**event, "node": name, "at_s": at_s, "iterations_done": state.iterations_done})


def _phase(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    state.phase = str(event.get("phase") or "")


def _iteration(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    iteration = _count(event.get("iteration"), state.iterations_done)
    state.iterations_done = iteration + 1
    state.numbers = {key: value for key, value in event.items() if key not in ("kind", "at_s")}
    state.numbers_s = at_s
    reward = _number(event.get("reward_mean"))
    if reward is not None:
        _add(state.rewards, iteration, reward)


def _eval(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    score = _number(event.get("score"))
    if score is not None:
        _add(state.scores, _count(event.get("iteration"), state.iterations_done), score)
        state.scored_s = at_s


def _checkpoint(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    state.checkpoint, state.checkpoint_s = _count(event.get("iteration"), state.iterations_done), at_s


def _grid(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    state.grids.append((_count(event.get("iteration"), state.iterations_done), str(event.get("path") or "")))


def _warning(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    state.warnings.append(str(event.get("text") or ""))


def _finished(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    summary = event.get("summary")
    state.summary = dict(summary) if isinstance(summary, Mapping) else {}
    _end(state, at_s)


def _failed(state: Progress, event: Mapping[str, Any], at_s: float) -> None:
    state.failure = {key: event.get(key) for key in ("code", "message", "hint")}
    _end(state, at_s)


def _end(state: Progress, at_s: float) -> None:
    """No node outlives its run, so none is shown as ready after it."""
    state.phase = ""
    for node in state.nodes.values():
        if not node.gone:
            node.state, node.why, node.since_s = "ended", "", at_s


_HANDLERS: Mapping[str, Callable[[Progress, Mapping[str, Any], float], None]] = {
    "run_started": _started,
    "node": _node,
    "phase": _phase,
    "iteration": _iteration,
    "eval": _eval,
    "checkpoint": _checkpoint,
    "grid": _grid,
    "warning": _warning,
    "run_finished": _finished,
    "run_failed": _failed,
}


class ProgressLog:
    """Keeps every event of a run in its folder, stamped and scrubbed, and hands it on."""

    def __init__(
        self,
        folder: Path,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lines = jsonl.JsonLines(folder / FILE_NAME)
        self._redactor = Redactor.from_environment()
        self._on_event = on_event
        self._clock = clock

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Stamp, scrub, write, hand on. A full disk is counted, not raised."""
        stamped = self._redactor.scrub({"at_s": self._clock(), **event})
        self._lines.append(stamped)
        if self._on_event is not None:
            self._on_event(stamped)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of a run folder, oldest first."""
    return (event for event in jsonl.read(folder / FILE_NAME) if event.get("kind") in KINDS)


def batches(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Each time it is asked, the events that are new since the last time; without end."""
    for batch in jsonl.batches(folder / FILE_NAME):
        yield [event for event in batch if event.get("kind") in KINDS]


def fold(source: Iterable[Mapping[str, Any]]) -> Progress:
    """The state after all events of `source`."""
    state = Progress()
    for event in source:
        state.apply(event)
    return state


def _add(series: list[tuple[int, float]], iteration: int, value: float) -> None:
    # A resumed run does some iterations again: the second time counts.
    while series and series[-1][0] >= iteration:
        series.pop()
    series.append((iteration, value))


def _number(value: Any) -> float | None:
    return float(value) if words.is_number(value) else None


def _count(value: Any, otherwise: int) -> int:
    number = _number(value)
    return otherwise if number is None else int(number)
