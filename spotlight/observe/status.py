"""What a run is doing, from its folder alone: one model for the table, for `--json` and for the page.

Every fact carries its age, so that a stale picture cannot pass for a fresh one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spotlight.errors import NotFoundError
from spotlight.observe import jsonl, progress, words

LAST_EVENTS = 5
# A run says something at least every iteration; after this long without a word it may well be dead.
SILENT_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node; lost ones stay listed."""

    node: str
    role: str
    price_class: str
    state: str
    why: str
    age_s: float


@dataclass(frozen=True, slots=True)
class EventStatus:
    """Something that happened, in words."""

    age_s: float
    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """One run at one moment. Ages are seconds before that moment; None: not known yet.

    `state` is running, silent (no word for two minutes), finished, failed or empty (nothing told yet).
    """

    run: str
    state: str
    iterations_done: int
    iterations: int
    phase: str
    score_base: float | None
    score: float | None
    score_age_s: float | None
    reward: float | None
    images_per_s: float | None
    numbers_age_s: float | None
    usd: float | None
    usd_per_h: float | None
    preemptions: int
    checkpoint: int | None
    checkpoint_age_s: float | None
    started_age_s: float | None
    seen_age_s: float | None
    eta_s: float | None
    nodes: tuple[NodeStatus, ...]
    events: tuple[EventStatus, ...]
    warnings: int
    failure: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`; no NaN."""
        return dict(jsonl.finite(asdict(self)))


def load(folder: Path, now_s: float) -> Status:
    """Read a run folder; `now_s` is Unix time. Raises NotFoundError when there is no such run."""
    if not folder.is_dir():
        raise NotFoundError(
            f"no run {words.clean(folder.name)!r}", hint="spotlight status   shows the newest run"
        )
    events = list(progress.events(folder))
    return build(progress.fold(events), events, folder.name, now_s)


def newest(home: Path) -> Path:
    """The folder of the run that was last heard of. Raises NotFoundError when there is none."""
    folders = [folder for folder in (home / "runs").glob("*") if folder.is_dir()]
    if not folders:
        raise NotFoundError(f"no run in {home / 'runs'} yet", hint="spotlight train   starts one")
    return max(folders, key=lambda folder: (_last_word(folder), folder.name))


def build(state: progress.Progress, events: list[dict[str, Any]], run: str, now_s: float) -> Status:
    """Turn a folded story into a status at `now_s`."""
    numbers = state.numbers
    return Status(
        run=state.run or run,
        state=_state(state, now_s),
        iterations_done=state.iterations_done,
        iterations=state.iterations,
        phase=state.phase,
        score_base=state.scores[0][1] if state.scores else None,
        score=state.scores[-1][1] if state.scores else None,
        score_age_s=_age(state.scored_s, now_s),
        reward=state.rewards[-1][1] if state.rewards else None,
        images_per_s=numbers.get("images_per_s"),
        numbers_age_s=_age(state.numbers_s, now_s),
        usd=numbers.get("usd"),
        usd_per_h=numbers.get("usd_per_h"),
        preemptions=state.preemptions,
        checkpoint=state.checkpoint,
        checkpoint_age_s=_age(state.checkpoint_s, now_s),
        started_age_s=_age(state.started_s, now_s),
        seen_age_s=_age(state.updated_s, now_s),
        eta_s=_eta(state),
        nodes=tuple(
            NodeStatus(n.node, n.role, n.price_class, n.state, n.why, max(0.0, now_s - n.since_s))
            for n in state.nodes.values()
        ),
        events=_last_events(events, now_s),
        warnings=len(state.warnings),
        failure=state.failure,
    )


def _state(state: progress.Progress, now_s: float) -> str:
    if state.failure is not None:
        return "failed"
    if state.summary is not None:
        return "finished"
    if state.updated_s is None:
        return "empty"
    return "silent" if now_s - state.updated_s > SILENT_AFTER_S else "running"


def _eta(state: progress.Progress) -> float | None:
    """Time left at the pace of the last iteration; None when ended or not known."""
    wall_s = state.numbers.get("wall_s")
    if state.ended or not isinstance(wall_s, (int, float)) or state.iterations <= 0:
        return None
    return float(wall_s) * max(0, state.iterations - state.iterations_done)


def _last_events(events: list[dict[str, Any]], now_s: float) -> tuple[EventStatus, ...]:
    told: list[EventStatus] = []
    for event in reversed(events):
        text = words.describe(event)
        at_s = event.get("at_s")
        if text is not None and isinstance(at_s, (int, float)):
            told.append(EventStatus(max(0.0, now_s - at_s), float(at_s), text))
        if len(told) == LAST_EVENTS:
            break
    return tuple(reversed(told))


def _age(at_s: float | None, now_s: float) -> float | None:
    # Two clocks may disagree; a fact from the future is fresh, not of negative age.
    return None if at_s is None else max(0.0, now_s - at_s)


def _last_word(folder: Path) -> float:
    story = folder / progress.FILE_NAME
    return (story if story.is_file() else folder).stat().st_mtime
