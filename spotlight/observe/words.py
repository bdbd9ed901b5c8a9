"""Events, figures and times in words, for terminals and pages alike. Plain text, safe to print."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

_BARS = "▁▂▃▄▅▆▇█"
_NODE_WORDS = {
    "joining": "is joining",
    "ready": "is ready",
    "notice": "has notice",
    "lost": "lost",
    "back": "is back",
}
PHASE_WORDS = {
    "explore": "explore",
    "roll_out": "roll out",
    "score": "score",
    "train": "train",
    "publish": "publish",
    "eval": "validate",
}


def clean(value: Any, limit: int = 300) -> str:
    """One printable line: control characters, escape sequences and direction marks can do nothing."""
    text = "".join(c if unicodedata.category(c)[0] != "C" else " " for c in str(value)[: 4 * limit])
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value from a log is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN and infinity too


def describe(event: Mapping[str, Any]) -> str | None:
    """One event as a sentence; None when a person need not hear of it (a phase)."""
    writer = _WRITERS.get(str(event.get("kind")))
    return clean(writer(event)) if writer is not None else None


def _started(event: Mapping[str, Any]) -> str:
    facts = [str(event[key]) for key in ("recipe", "algorithm", "model") if event.get(key)]
    count = event.get("iterations")
    return f"run {event.get('run', '?')} started" + (
        f" ({', '.join([*facts, *([f'{count} iterations'] if count is not None else [])])})"
        if facts or count is not None
        else ""
    )


def _node(event: Mapping[str, Any]) -> str:
    state = str(event.get("state"))
    why = f": {event['why']}" if event.get("why") else ""
    return f"node {event.get('node', '?')} {_NODE_WORDS.get(state, state)}{why}"


def _iteration(event: Mapping[str, Any]) -> str:
    parts = [
        f"{label} {figure(event[key])}{unit}"
        for key, label, unit in (
            ("reward_mean", "reward", ""),
            ("loss", "loss", ""),
            ("images_per_s", "roll-out", " images/s"),
            ("drafts", "drafts", ""),
            ("wall_s", "wall", " s"),
        )
        if event.get(key) is not None
    ]
    if event.get("spot_busy_share") is not None:
        parts.append(f"spot busy {share(event['spot_busy_share'])}")
    if event.get("zero_variance_groups"):
        parts.append(f"{figure(event['zero_variance_groups'])} groups without variance")
    return f"iteration {event.get('iteration', '?')}: {', '.join(parts)}"


def _eval(event: Mapping[str, Any]) -> str:
    exact = f", exact {share(event['exact'])}" if event.get("exact") is not None else ""
    return f"held-out score {figure(event.get('score'))}{exact} (iteration {event.get('iteration', '?')})"


def _finished(event: Mapping[str, Any]) -> str:
    told = event.get("summary")
    summary = told if isinstance(told, Mapping) else {}
    return (
        f"run finished: held-out score {figure(summary.get('score_base'))} -> "
        f"{figure(summary.get('score_final'))} in {duration(summary.get('wall_s'))}"
    )


_WRITERS = {
    "run_started": _started,
    "node": _node,
    "iteration": _iteration,
    "eval": _eval,
    "checkpoint": lambda event: f"checkpoint of iteration {event.get('iteration', '?')} written",
    "grid": lambda event: f"samples drawn: {event.get('path', '?')}",
    "warning": lambda event: f"warning: {event.get('text', '')}",
    "run_finished": _finished,
    "run_failed": lambda event: f"run failed: {event.get('message', '')}",
}


def figure(value: Any) -> str:
    """A number for a person: integers whole, others to three significant digits; '-' for none."""
    if not is_number(value):
        return "-"
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e6):
        return f"{int(value)}"
    return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.0f}"


def score(value: Any) -> str:
    """A score to two places, or '-'."""
    return f"{value:.2f}" if is_number(value) else "-"


def share(value: Any) -> str:
    """A share as per cent, or '-'."""
    return f"{100 * value:.0f} %" if is_number(value) else "-"


def usd(value: Any) -> str:
    """Dollars; a fraction of a cent is shown as such, never as nothing."""
    if not is_number(value):
        return "-"
    return f"${value:,.2f}" if value == 0 or abs(value) >= 0.1 else f"${value:.4f}"


def duration(seconds: Any) -> str:
    """'7.2 s', '2 min 05 s', '3 h 10 min'; '-' for none."""
    if not is_number(seconds):
        return "-"
    seconds = max(0.0, float(seconds))
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def ago(seconds: float | None) -> str:
    """The age of a fact."""
    return "never" if seconds is None else f"{duration(seconds)} ago"


def clock(at_s: Any) -> str:
    """Local time of day."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at_s))
    except (TypeError, ValueError, OverflowError, OSError):  # not a time, or not one of this calendar
        return "--:--:--"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The course of a series in block characters: the last `width` points, scaled to their own range."""
    tail = [value for value in values if value == value][-width:]
    if not tail:
        return ""
    low, high = min(tail), max(tail)
    if high == low:
        return _BARS[3] * len(tail)
    return "".join(_BARS[min(7, int((value - low) / (high - low) * 8))] for value in tail)


def _drafts(summary: Mapping[str, Any]) -> str:
    """Drafts that began and ended while the trainers trained, of all drafts."""
    inside, total = summary.get("drafts_in_training"), summary.get("drafts")
    return figure(total) if inside is None else f"{figure(inside)} of {figure(total)}"


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The end of a run: label and value, in the order a person asks."""
    get = summary.get
    base, final = get("score_base"), get("score_final")
    gain = f"  ({final - base:+.2f})" if is_number(base) and is_number(final) else ""
    lines = [
        ("held-out score", f"{score(base)} → {score(final)}{gain}"),
        ("iterations", f"{figure(get('iterations'))} in {duration(get('wall_s'))}"),
        ("drafts during training", _drafts(summary)),
    ]
    busy = get("spot_busy_share")
    if is_number(busy):
        lines.append(("spot nodes idle", f"{share(1 - busy)} of the training time (busy {share(busy)})"))
    lines += [
        ("preemptions survived", figure(get("preemptions"))),
        ("samples moved / lost", f"{figure(get('samples_moved'))} / {figure(get('samples_lost'))}"),
    ]
    if is_number(get("usd_estimate")):
        on_demand = get("usd_on_demand")
        beside = f", {usd(on_demand)} on demand only" if is_number(on_demand) else ""
        lines.append(("the same hours on H100s", f"{usd(summary['usd_estimate'])} (estimate{beside})"))
    return lines
