"""The view of a run while it runs: one panel that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spotlight.observe import words
from spotlight.observe.progress import PHASES, Progress
from spotlight_cli.render import STYLES, Output

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_QUIET_S = 30.0  # without a terminal: at least this often a word during a long phase
_TOLD_ABOVE = frozenset({"run_started", "node", "eval", "warning", "run_failed"})
_DOTS = {"ready": "●", "back": "●", "joining": "◌", "notice": "◐", "lost": "✖"}


class RunView:
    """Takes the events of a run, in any thread; use as a context manager."""

    def __init__(self, output: Output, clock: Callable[[], float] = time.time) -> None:
        self.progress = Progress()
        self._output = output
        self._clock = clock
        self._live: Live | None = None
        self._spoke_s = clock()

    def __enter__(self) -> RunView:
        if self._output.live:
            from rich.live import Live

            self._live = Live(
                console=self._output.console(stderr=True),
                get_renderable=lambda: panel(self.progress, self._clock()),
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event. Never raises for a malformed one: the view must not end a run."""
        stamped = {"at_s": self._clock(), **event}
        self.progress.apply(stamped)
        if self._live is None:
            self._plain(stamped)
        elif stamped.get("kind") in _TOLD_ABOVE:
            self._live.console.print(line(stamped), style=_style(stamped))

    def _plain(self, event: Mapping[str, Any]) -> None:
        now = self._clock()
        if event.get("kind") == "phase":
            if now - self._spoke_s < _QUIET_S:
                return
            phase = words.PHASE_WORDS.get(str(event.get("phase")), event.get("phase"))
            text = f"{words.clock(now)}  iteration {event.get('iteration', '?')}: {words.clean(phase)}"
        elif words.describe(event) is None:
            return
        else:
            text = line(event)
        self._spoke_s = now
        self._output.say(text)


def line(event: Mapping[str, Any]) -> str:
    """An event as one line with its time."""
    return f"{words.clock(event.get('at_s'))}  {words.describe(event) or words.clean(event.get('kind'))}"


def panel(progress: Progress, now_s: float) -> RenderableType:
    """The picture of a run at `now_s`: head, phases, score, speed, nodes, money."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="ellipsis", no_wrap=True)
    for label, value in _rows(progress, now_s):
        grid.add_row(label, value)
    return grid


def _rows(progress: Progress, now_s: float) -> list[tuple[str, RenderableType]]:
    from rich.text import Text

    numbers = progress.numbers
    elapsed = words.duration(now_s - progress.started_s) if progress.started_s is not None else "-"
    done = f"{progress.iterations_done}/{progress.iterations} iterations"
    head = f"{words.clean(progress.run, 40)}  {done}  {elapsed}"
    rows: list[tuple[str, RenderableType]] = [("run", Text(head, style="bold")), ("phase", _phases(progress))]
    if progress.scores:
        course = words.sparkline([score for _, score in progress.scores])
        first, last = progress.scores[0][1], progress.scores[-1][1]
        rows.append(("score", Text(f"{words.score(first)} → {words.score(last)}  {course}", style="green")))
    if progress.rewards:
        course = words.sparkline([reward for _, reward in progress.rewards])
        rows.append(("reward", Text(f"{words.score(progress.rewards[-1][1])}  {course}")))
    rows.append(("speed", Text(_speed(numbers))))
    rows.append(("nodes", _nodes(progress)))
    if numbers.get("usd") is not None:
        rows.append(("cost", Text(f"{words.usd(numbers['usd'])} so far")))
    return rows


def _phases(progress: Progress) -> RenderableType:
    from rich.text import Text

    text = Text()
    for index, phase in enumerate(PHASES):
        text.append("  " if index else "")
        current = phase == progress.phase
        text.append(f"{'▸' if current else ' '}{words.PHASE_WORDS[phase]}", "bold cyan" if current else "dim")
    return text


def _speed(numbers: Mapping[str, Any]) -> str:
    parts = [
        f"{words.figure(numbers[key])} {unit}"
        for key, unit in (("images_per_s", "images/s"), ("drafts", "drafts"))
        if numbers.get(key) is not None
    ]
    if numbers.get("spot_busy_share") is not None:
        parts.append(f"spot busy {words.share(numbers['spot_busy_share'])}")
    return "   ".join(parts) or "-"


def _nodes(progress: Progress) -> RenderableType:
    from rich.text import Text

    text = Text()
    for node in progress.nodes.values():
        text.append(f"{_DOTS.get(node.state, '?')} {words.clean(node.node, 24)}", STYLES.get(node.state, ""))
        if node.state in ("notice", "lost"):
            text.append(f" ({words.clean(node.why or node.state, 40)})", "dim")
        text.append("  ")
    return text if progress.nodes else Text("-")


def _style(event: Mapping[str, Any]) -> str:
    if event.get("kind") == "warning":
        return "yellow"
    if event.get("kind") == "run_failed":
        return "bold red"
    return STYLES.get(str(event.get("state")), "") if event.get("kind") == "node" else ""
