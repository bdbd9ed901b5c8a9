"""Large prompt files: rows by number, whatever the file's size, and no more memory than an index."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotlight.errors import DataError
from spotlight.rl import data, prompt_files


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Rows of `prompt` and `target` in the format that the name says."""
    if path.suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" * (i % 2) + "\n" for i, row in enumerate(rows)))
    elif path.suffix == ".csv":
        path.write_text("prompt,target\n" + "".join('"{prompt}",{target}\n\n'.format(**row) for row in rows))
    else:
        path.write_text("".join(f" {row['prompt']} \n\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
def test_rows_are_had_in_any_order(tmp_path: Path, kind: str, known: bool) -> None:
    end = "\nin two lines" if kind == "csv" else ""
    rows = [{"prompt": f"größe {i} ✓{end}", "target": str(i)} for i in range(95)]
    prompts = data.load(write(tmp_path / f"p.{kind}", rows), known=known)
    wanted = [data.Prompt(i, row["prompt"], {"target": row["target"]}) for i, row in enumerate(rows)]
    if kind == "txt":
        wanted = [data.Prompt(prompt.row, prompt.text, {}) for prompt in wanted]
    assert len(prompts) == 95
    assert [prompts[i] for i in reversed(range(95))] == wanted[::-1]
    assert prompts[-1] == wanted[-1]
    assert prompts[90:200:2] == wanted[90:200:2]
    assert list(prompts) == wanted
    with pytest.raises(IndexError):
        prompts[95]
    assert [p.row for p in data.batch(prompts, 3, 8, seed=5)] == [
        p.row for p in data.batch(wanted, 3, 8, seed=5)
    ]


def test_a_batch_is_the_one_it_always_was(tmp_path: Path) -> None:
    """Of 1000 rows with seed 7: frozen, for a run that is resumed must go on with the same prompts."""
    prompts = data.load(write(tmp_path / "p.txt", [{"prompt": f"{i}", "target": ""} for i in range(1000)]))
    assert [p.row for p in data.batch(prompts, 0, 4, seed=7)] == FIRST
    assert [p.row for p in data.batch(prompts, 251, 4, seed=7)] == IN_THE_SECOND_EPOCH


FIRST = [816, 923, 151, 900]
IN_THE_SECOND_EPOCH = [337, 612, 939, 226]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["\n", "\r", "\r\n", "a", "é", "𝄞", " ", "\u2028", "\x85", "b c"]), max_size=30
    ),
    chunk=st.integers(1, 9),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
)
def test_it_does_not_matter_where_a_chunk_ends(
    tmp_path: Path, parts: list[str], chunk: int, encoding: str
) -> None:
    text = "".join(parts)
    path = tmp_path / "p.txt"
    path.write_bytes(text.encode(encoding))
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    wanted = [line.strip() for line in lines if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_files, "CHUNK_BYTES", chunk)
        if not wanted:
            with pytest.raises(DataError, match="no prompts"):
                data.load(str(path))
            return
        prompts = data.load(str(path))
        assert [prompt.text for prompt in prompts] == wanted
        numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
        seen: list[str] = []
        prompt_files.open_rows(path, lambda record: seen.append(record[0]))
        assert seen == [f"{path}:{number}" for number in numbers]


def test_a_known_file_is_looked_at_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "good"}\n{"promt": "bad"}\n{"prompt": "good too"}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2: no `prompt`"):
        data.load(str(path))
    prompts = data.load(str(path), known=True)
    assert [prompts[0].text, prompts[2].text] == ["good", "good too"]
    with pytest.raises(DataError, match=r"p\.jsonl, row 1: no `prompt`"):
        prompts[1]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    for kind in ("txt", "jsonl", "csv"):
        path = Path(write(tmp_path / f"p.{kind}", [{"prompt": f"one {i}", "target": "x"} for i in range(50)]))
        prompts = data.load(str(path))
        with path.open("r+b") as file:
            file.truncate(20)
        with pytest.raises(DataError, match=rf"p\.{kind}, row 40"):
            prompts[40]


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_files, "MAX_LINE_CHARS", 1000)
    monkeypatch.setattr(prompt_files, "CHUNK_BYTES", 100)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "x": "' + "y" * 5000 + '"}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2: a line of more than 1000 characters"):
        data.load(str(path))


MEASURE = """
import resource, sys
from spotlight.rl import data
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
data.load(sys.argv[1])[0]
before = peak()
prompts = data.load(sys.argv[2])
for iteration in range(3):
    data.batch(prompts, iteration, 16, seed=0)
print(len(prompts), peak() - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
def test_a_file_of_hundreds_of_thousands_of_rows_costs_an_index(tmp_path: Path, kind: str) -> None:
    """Peak memory above that of a small file, as a share of the file; rows of 400 bytes need 2 % for the index."""
    rows = [{"prompt": f"{i} " + "long prompt " * 32, "target": str(i)} for i in range(1000)]
    small = write(tmp_path / f"small.{kind}", rows[:50])
    large = tmp_path / f"large.{kind}"
    if kind == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        with pq.ParquetWriter(
            large, pa.Table.from_pylist(rows).schema, compression="none", use_dictionary=False
        ) as file:
            for _ in range(150):
                file.write_table(pa.Table.from_pylist(rows))
    else:
        block = Path(write(tmp_path / f"block.{kind}", rows)).read_text()
        with large.open("w") as file:
            file.write(block)
            for _ in range(149):
                file.write(block.removeprefix("prompt,target\n"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, str(large)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    count, peak = map(int, done.stdout.split())
    assert count == 150_000
    assert large.stat().st_size > 50e6
    assert peak < 0.25 * large.stat().st_size, f"{peak / large.stat().st_size:.2f} of the file"
