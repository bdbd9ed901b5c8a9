"""The page of a run: complete, self-contained, and deaf to what prompts try to say to a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spotlight.errors import NotFoundError, UserError
from spotlight.observe import charts, grids, progress, report

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>' onload='x"
ALLOWED_TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "dl", "dt", "dd", "svg", "text",
    "line", "polyline", "circle", "rect", "figure", "figcaption", "img", "table", "tr", "td",
}  # fmt: skip


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def folder_with(tmp_path: Path, text: str = "plain") -> Path:
    folder = tmp_path / "r"
    log = progress.ProgressLog(folder)
    picture = np.full((16, 32), 99, np.uint8)
    log({"kind": "run_started", "at_s": 0.0, "run": text, "recipe": text, "iterations": 20})
    log({"kind": "node", "at_s": 1.0, "node": f"spot-{text}", "state": "ready", "why": text})
    for i in range(20):
        path = grids.write_grid(folder, i, [picture], [text], title=text).relative_to(folder)
        log({"kind": "grid", "at_s": 2.0 + i, "iteration": i, "path": str(path)})
        log({"kind": "iteration", "at_s": 2.0 + i, "iteration": i, "reward_mean": i / 20, text: text})
        log({"kind": "eval", "at_s": 2.5 + i, "iteration": i, "score": i / 25})
        if i == 12:
            log({"kind": "node", "at_s": 15.0, "node": f"spot-{text}", "state": "lost", "why": text})
    log({"kind": "warning", "at_s": 30.0, "text": text})
    log(
        {
            "kind": "run_finished",
            "at_s": 40.0,
            "summary": {"score_base": 0.0, "score_final": 0.76, "drafts": 5},
        }
    )
    log.close()
    return folder


def test_the_page_is_complete_and_self_contained(tmp_path: Path) -> None:
    path = report.write(folder_with(tmp_path))
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == []
    text = " ".join(page.words)
    for said in ("0.00 → 0.76", "spot-plain", "warning: plain", "before, iteration 0", "after, iteration 19"):
        assert said in text, said
    images = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(images) == report.MAX_GRIDS
    assert all(source and source.startswith("data:image/png;base64,") for source in images)
    assert sum(tag == "svg" for tag, _ in page.tags) == 2
    assert "✖" in text
    assert html.count('class="mark"') == 1
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:|//|file:)", html)
    assert "default-src 'none'" in html
    assert "http" not in html.replace("http-equiv", "")


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    page = Page(report.write(folder_with(tmp_path, HOSTILE)).read_text(encoding="utf-8"))
    assert page.open == []
    assert {tag for tag, _ in page.tags} <= ALLOWED_TAGS
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("href", "xlink:href")], (
            tag
        )
    assert "<script>alert(1)</script>" in " ".join(page.words)


def test_pictures_from_outside_the_run_are_not_taken(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (tmp_path / "secret.png").write_bytes(b"\x89PNG\r\n\x1a\n secret")
    (folder / "text.png").write_text("not a picture")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    log = progress.ProgressLog(folder)
    for path in (
        "../secret.png",
        str(tmp_path / "secret.png"),
        "text.png",
        "link.png",
        "none.png",
        "\0",
        "samples",
    ):
        log({"kind": "grid", "iteration": 99, "path": path})
    events = [
        event for event in progress.events(folder) if event["kind"] != "grid" or event["iteration"] == 99
    ]
    assert "<img" not in report.page(folder, events)


def test_an_unfinished_and_a_failed_run_have_a_page(tmp_path: Path) -> None:
    started = {"kind": "run_started", "at_s": 0.0, "run": "r", "iterations": 3}
    assert "not finished: 0 of 3 iterations" in report.page(tmp_path, [started])
    failed = {"kind": "run_failed", "at_s": 1.0, "code": "training", "message": "ratio 1.3 <b>", "hint": None}
    assert "failed: ratio 1.3 &lt;b&gt;" in report.page(tmp_path, [started, failed])


def test_where_it_goes_and_what_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    assert report.write(folder, tmp_path / "r.html") == tmp_path / "r.html"
    with pytest.raises(UserError, match="cannot write"):
        report.write(folder, tmp_path / "none" / "r.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="no story"):
        report.write(tmp_path / "empty")
    with pytest.raises(NotFoundError, match="no run 'gone'"):
        report.write(tmp_path / "gone")
    assert not [path for path in tmp_path.rglob("*.part")]


def test_the_timeline_shows_each_life_of_a_node() -> None:
    events = [
        {"kind": "run_started", "at_s": 0.0},
        {"kind": "node", "at_s": 10.0, "node": "a", "state": "joining"},
        {"kind": "node", "at_s": 20.0, "node": "a", "state": "ready"},
        {"kind": "node", "at_s": 60.0, "node": "a", "state": "lost", "why": "killed"},
        {"kind": "node", "at_s": 80.0, "node": "a", "state": "back"},
        {"kind": "warning", "at_s": 100.0, "text": ""},
    ]
    spans = report._spans(progress.fold(events))
    assert [(s.state, s.start_s, s.end_s, s.lost) for s in spans] == [
        ("joining", 10.0, 20.0, False),
        ("ready", 20.0, 60.0, True),
        ("back", 80.0, 100.0, False),
    ]
    assert spans[1].why == "killed"


@pytest.mark.parametrize(
    "points",
    [[], [(0, float("nan"))], [(0, 1.0)], [(0, 1.0), (1, 1.0)], [(0, 0.0), (1, float("inf")), (2, 1e300)]],
)
def test_charts_of_few_or_odd_points(points: list[tuple[float, float]]) -> None:
    svg = charts.line_chart({"a": points}, x_label="x", y_label="y")
    assert "nan" not in svg.replace("nothing measured", "")
    assert "inf" not in svg
    Page(svg)
