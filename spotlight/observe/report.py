"""One run as one HTML file that needs nothing else: no script, no font, no image from elsewhere.

Prompts, names and reasons are foreign text: everything is escaped, and the page forbids scripts to itself.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from spotlight.errors import NotFoundError, UserError
from spotlight.names import inside
from spotlight.observe import charts, progress, words

MAX_GRIDS = 6
MAX_IMAGE_BYTES = 8_000_000

_CSS = """
:root{color-scheme:light dark;--ink:#18181b;--paper:#fafaf8;--faint:#71717a;--line:#e4e4e7}
@media(prefers-color-scheme:dark){:root{--ink:#f4f4f5;--paper:#18181b;--faint:#a1a1aa;--line:#3f3f46}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:820px;
margin:2rem auto;padding:0 1rem}h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.sub,.empty,figcaption,.at{color:var(--faint)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem}
dt{color:var(--faint)}dd{margin:0;font-variant-numeric:tabular-nums}svg{width:100%;height:auto}
svg text{font:11px system-ui,sans-serif;fill:currentColor}svg .tick{fill:var(--faint)}
svg .end{text-anchor:end}
svg .middle{text-anchor:middle}svg .grid{stroke:var(--line)}svg .mark{stroke:#dc2626;stroke-dasharray:3 3}
svg .kill{fill:#dc2626;font-size:14px;text-anchor:middle}figure{margin:0 0 1.2rem}
img{max-width:100%;image-rendering:pixelated}
table{border-collapse:collapse;width:100%}td{padding:.1rem .8rem .1rem 0;vertical-align:top}
.bad{color:#dc2626}
"""


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder, to `report.html` in it or to `out`; return the path.

    Raises NotFoundError when the run does not exist or has told nothing yet, UserError when `out` cannot be
    written.
    """
    if not folder.is_dir():
        raise NotFoundError(
            f"no run {words.clean(folder.name)!r}", hint="spotlight status   shows the newest run"
        )
    events = list(progress.events(folder))
    if not events:
        raise NotFoundError(
            f"run {words.clean(folder.name)!r} has no story yet", hint="spotlight train   starts a run"
        )
    path = folder / "report.html" if out is None else out
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(page(folder, events), encoding="utf-8", errors="replace")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return path


def page(folder: Path, events: Sequence[Mapping[str, Any]]) -> str:
    """The HTML of a run."""
    state = progress.fold(events)
    sections = [
        _head(state, folder.name),
        _summary(state),
        _section("Score and reward", _curves(state)),
        _section("Nodes", charts.timeline(_spans(state), *_extent(state))),
        _section("Samples", _grids(folder, state)),
        _section("What happened", _story(events)),
    ]
    title = escape(words.clean(state.run or folder.name))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title} · Spotlight</title><style>{_CSS}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _head(state: progress.Progress, name: str) -> str:
    facts = [
        f"{key} {words.clean(value, 80)}"
        for key, value in state.facts.items()
        if key != "run" and isinstance(value, (str, int, float))
    ]
    return f'<h1>{escape(words.clean(state.run or name))}</h1><p class="sub">{escape(" · ".join(facts))}</p>'


def _summary(state: progress.Progress) -> str:
    if state.failure is not None:
        text = f"failed: {state.failure.get('message') or ''} {state.failure.get('hint') or ''}"
        return f'<p class="bad">{escape(words.clean(text))}</p>'
    if state.summary is None:
        return f'<p class="sub">not finished: {state.iterations_done} of {state.iterations} iterations</p>'
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in words.summary_lines(state.summary))
    return f"<dl>{rows}</dl>"


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"


def _curves(state: progress.Progress) -> str:
    series = {"held-out score": state.scores, "mean reward in training": state.rewards}
    lost = [event["iterations_done"] for event in state.node_events if event.get("state") == "lost"]
    drawn = {name: points for name, points in series.items() if points}
    return charts.line_chart(drawn, x_label="iteration", y_label="score", marks=lost)


def _extent(state: progress.Progress) -> tuple[float, float]:
    start = state.started_s or 0.0
    return start, max(start, state.updated_s or start)


def _spans(state: progress.Progress) -> list[charts.Span]:
    """Each node's states as intervals; the last one lasts until the last word of the run."""
    lives: dict[str, list[Mapping[str, Any]]] = {}
    for event in state.node_events:
        lives.setdefault(event["node"], []).append(event)
    return [
        _span(event, following, *_extent(state))
        for life in lives.values()
        for event, following in zip_longest(life, life[1:])
        if event.get("state") != "lost"
    ]


def _span(
    event: Mapping[str, Any], following: Mapping[str, Any] | None, start_s: float, end_s: float
) -> charts.Span:
    lost = following is not None and following.get("state") == "lost"
    told = following if following is not None and lost else event
    begin_s = max(start_s, float(event["at_s"]))
    until_s = end_s if following is None else float(following["at_s"])
    why = words.clean(told.get("why") or "", 120)
    return charts.Span(
        event["node"], str(event.get("state")), begin_s, max(begin_s, until_s), lost=lost, why=why
    )


def _grids(folder: Path, state: progress.Progress) -> str:
    figures = [
        f'<figure><img alt="samples at iteration {iteration}" src="{uri}">'
        f"<figcaption>{label}, iteration {iteration}</figcaption></figure>"
        for label, iteration, path in _before_during_after(state.grids)
        if (uri := _data_uri(folder, path)) is not None
    ]
    return "".join(figures) or '<p class="empty">no samples drawn</p>'


def _before_during_after(grids: Sequence[tuple[int, str]]) -> Iterable[tuple[str, int, str]]:
    """The first, the last and evenly chosen ones between."""
    if len(grids) > MAX_GRIDS:
        grids = [grids[round(k * (len(grids) - 1) / (MAX_GRIDS - 1))] for k in range(MAX_GRIDS)]
    for index, (iteration, path) in enumerate(grids):
        last = index == len(grids) - 1 and index > 0
        yield ("before" if index == 0 else "after" if last else "during"), iteration, path


def _data_uri(folder: Path, path: str) -> str | None:
    """The picture inlined; None unless it is a PNG of sane size inside the run folder."""
    try:
        file = inside(folder, path)
        if not file.is_file() or file.stat().st_size > MAX_IMAGE_BYTES:
            return None
        data = file.read_bytes()
    except (OSError, UserError, ValueError):
        return None
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"


def _story(events: Sequence[Mapping[str, Any]]) -> str:
    told = [(event, words.describe(event)) for event in events if event.get("kind") != "iteration"]
    rows = "".join(
        f'<tr><td class="at">{words.clock(event.get("at_s"))}</td><td>{escape(text)}</td></tr>'
        for event, text in told
        if text is not None
    )
    return f"<table>{rows}</table>"
