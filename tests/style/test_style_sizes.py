"""The sizes the code base promises to keep to."""

from __future__ import annotations

import ast
import statistics

from style.repo import PRODUCT, ROOT, modules, relative, tree

MAX_MODULE, MAX_FUNCTION, MAX_MEDIAN_MODULE = 400, 60, 150
MAX_LOOP, MAX_TEST_MODULE = 120, 600


def lines(path: object) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())  # type: ignore[attr-defined]


def test_no_module_is_longer_than_400_lines() -> None:
    long = {relative(p): lines(p) for p in modules(*PRODUCT, "benchmarks") if lines(p) > MAX_MODULE}
    assert not long


def test_no_test_module_is_longer_than_600_lines() -> None:
    long = {relative(p): lines(p) for p in modules("tests") if lines(p) > MAX_TEST_MODULE}
    assert not long


def test_no_function_is_longer_than_60_lines() -> None:
    long = {
        f"{relative(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in modules(*PRODUCT, "benchmarks")
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION
    }
    assert not long


def test_the_median_module_is_short() -> None:
    assert statistics.median(map(lines, modules(*PRODUCT))) <= MAX_MEDIAN_MODULE


def test_the_algorithm_is_on_one_page() -> None:
    assert lines(ROOT / "spotlight" / "runtime" / "loop.py") <= MAX_LOOP


def test_every_module_says_what_it_is_for() -> None:
    assert not [relative(path) for path in modules(*PRODUCT) if not ast.get_docstring(tree(path))]
