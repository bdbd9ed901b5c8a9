"""Figures and lines for people."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.observe import words


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (3.0, "3"), (0.123456, "0.123"), (21.44, "21.4"), (12345.6, "12346"), (None, "-"),
     (math.nan, "-"), (math.inf, "-"), (True, "-"), ("x", "-"), (1e-7, "1e-07"), (-0.5, "-0.5")],
)  # fmt: skip
def test_figures(value: Any, text: str) -> None:
    assert words.figure(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (7.25, "7.2 s"), (59.4, "59 s"), (125, "2 min 05 s"), (11400, "3 h 10 min"), (-3, "0.0 s"),
     (None, "-"), (math.nan, "-"), (math.inf, "-")],
)  # fmt: skip
def test_durations(seconds: Any, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "$0.00"), (0.0312, "$0.0312"), (18.2, "$18.20"), (1234.5, "$1,234.50"), (None, "-")],
)
def test_money_is_never_silently_nothing(value: Any, text: str) -> None:
    assert words.usd(value) == text


def test_shares_scores_ages() -> None:
    assert [words.share(0.94), words.share(None)] == ["94 %", "-"]
    assert [words.score(0.5), words.score(math.nan)] == ["0.50", "-"]
    assert [words.ago(4.0), words.ago(None)] == ["4.0 s ago", "never"]


def test_sparkline_keeps_its_width_and_order() -> None:
    assert words.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert words.sparkline([1.0, 1.0]) == "▄▄"
    assert words.sparkline([]) == ""
    assert words.sparkline([math.nan, 1.0, 2.0]) == "▁█"
    assert len(words.sparkline(list(range(1000)), width=32)) == 32


@given(st.text(), st.integers(min_value=1, max_value=50))
def test_clean_text_is_one_printable_line_within_the_limit(text: str, limit: int) -> None:
    cleaned = words.clean(text, limit)
    assert len(cleaned) <= limit
    assert cleaned.isprintable()


@pytest.mark.parametrize(
    "hostile", ["a\x1b[31mb", "a\x9b31mb", "a\x07b", "a\rb", "a\u202eb", "a\u2066b", "a\x00b", "a\u200db"]
)
def test_control_characters_can_do_nothing(hostile: str) -> None:
    assert words.clean(hostile).startswith("a ")


def test_a_summary_with_nothing_in_it_still_reads() -> None:
    assert dict(words.summary_lines({}))["held-out score"] == "- → -"
