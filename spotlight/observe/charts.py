"""Inline SVG: a line chart and a timeline of nodes. Text is escaped here, so any label may be passed in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_W, _H = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 14, 34
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed")
_STATE_COLOURS: Mapping[str, str] = {
    "joining": "#93c5fd",
    "ready": "#16a34a",
    "back": "#16a34a",
    "notice": "#f59e0b",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A node in one state from `start_s` to `end_s`; `lost` marks a kill at its end."""

    node: str
    state: str
    start_s: float
    end_s: float
    lost: bool
    why: str


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    marks: Sequence[float] = (),
) -> str:
    """Draw named series of (x, y); `marks` are x positions of dashed lines (preemptions)."""
    points = [point for line in series.values() for point in line if all(map(math.isfinite, point))]
    if not points:
        return '<p class="empty">nothing measured yet</p>'
    (x0, x1), (y0, y1) = _range([x for x, _ in points]), _range([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x0) / (x1 - x0) * (_W - _LEFT - _RIGHT),
            _H - _BOTTOM - (y - y0) / (y1 - y0) * (_H - _TOP - _BOTTOM),
        )

    parts = [_axis(x0, x1, y0, y1, place(x0, y0), place(x1, y1), x_label, y_label)]
    for mark in marks:
        if x0 <= mark <= x1:
            x, _ = place(mark, y0)
            parts.append(f'<line class="mark" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_H - _BOTTOM}"/>')
    for index, (name, line) in enumerate(series.items()):
        parts.append(_line(name, [place(*p) for p in line if all(map(math.isfinite, p))], line, index))
    return _svg(_H, f"{y_label} over {x_label}", "".join(parts))


def timeline(spans: Sequence[Span], start_s: float, end_s: float) -> str:
    """Draw one row a node: when it was there, when it had notice, when it was lost."""
    if not spans:
        return '<p class="empty">no node seen</p>'
    names = list(dict.fromkeys(span.node for span in spans))
    row, left = 22, 150
    width, height = _W - left - _RIGHT, row * len(names) + 26
    length = max(end_s - start_s, 1e-9)
    parts = [
        f'<text x="0" y="{row * i + 15}">{escape(_short(name, 22))}<title>{escape(name)}</title></text>'
        for i, name in enumerate(names)
    ]
    for span in spans:
        y = row * names.index(span.node) + 3
        x = left + (span.start_s - start_s) / length * width
        w = max(1.5, (span.end_s - span.start_s) / length * width)
        tip = escape(f"{span.node}: {span.state}{', ' + span.why if span.why else ''}")
        colour = _STATE_COLOURS.get(span.state, "#a1a1aa")
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="16" rx="2" fill="{colour}">'
            f"<title>{tip}</title></rect>"
        )
        if span.lost:
            parts.append(f'<text class="kill" x="{x + w:.1f}" y="{y + 13}">✖<title>{tip}</title></text>')
    parts.append(f'<text class="tick" x="{left}" y="{height - 4}">0 s</text>')
    parts.append(f'<text class="tick end" x="{_W - _RIGHT}" y="{height - 4}">{length:.0f} s</text>')
    return _svg(height, "nodes over time", "".join(parts))


def _line(
    name: str, placed: Sequence[tuple[float, float]], values: Sequence[tuple[float, float]], index: int
) -> str:
    colour = _COLOURS[index % len(_COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    finite = [point for point in values if all(map(math.isfinite, point))]
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"><title>{vx:g}: {vy:.3g}</title></circle>'
        for (x, y), (vx, vy) in zip(placed, finite, strict=True)
    )
    legend = f'<text x="{_LEFT + 10 + 150 * index}" y="{_TOP + 4}" fill="{colour}">{escape(name)}</text>'
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}{legend}'


def _axis(
    x0: float,
    x1: float,
    y0: float,
    y1: float,
    origin: tuple[float, float],
    corner: tuple[float, float],
    x_label: str,
    y_label: str,
) -> str:
    (left, bottom), (right, top) = origin, corner
    ticks = "".join(
        f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        f'<text class="tick end" x="{left - 6}" y="{y + 4:.1f}">{y0 + (y1 - y0) * k / 4:.3g}</text>'
        for k in range(5)
        for y in (bottom + (top - bottom) * k / 4,)
    )
    return (
        f'{ticks}<text class="tick" x="{left}" y="{_H - 16}">{x0:g}</text>'
        f'<text class="tick end" x="{right}" y="{_H - 16}">{x1:g}</text>'
        f'<text class="tick middle" x="{(left + right) / 2}" y="{_H - 4}">{escape(x_label)}</text>'
        f'<text class="tick middle" transform="rotate(-90)" x="{-(top + bottom) / 2}" y="11">'
        f"{escape(y_label)}</text>"
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _svg(height: float, label: str, body: str) -> str:
    return f'<svg viewBox="0 0 {_W} {height:.0f}" role="img" aria-label="{escape(label)}">{body}</svg>'
