"""Whatever bytes a prompt file holds and whatever a prompt says: read it or say so, never anything else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotlight.errors import DataError
from spotlight.rl import data
from spotlight.rl.rewards.ocr import edit_score, normalise, soft_score, target_of

FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".parquet"])
@FILES
@given(content=st.binary(max_size=300))
def test_any_bytes_are_prompts_or_a_data_error(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    try:
        prompts = data.load(str(path))
    except DataError as error:
        prompts, message = [], error.message
    else:
        message = path.name
        assert prompts
    assert path.name in message
    assert all(prompt.text.strip() for prompt in prompts)
    assert [prompt.row for prompt in prompts] == list(range(len(prompts)))


lines = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30).filter(
    lambda text: text.strip() and not text.startswith("\ufeff")
)


@FILES
@given(texts=st.lists(lines, min_size=1, max_size=8), end=st.sampled_from(["\n", "\r\n", "\r"]),
       encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))  # fmt: skip
def test_a_text_file_comes_back_line_by_line(
    tmp_path: Path, texts: list[str], end: str, encoding: str
) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(end.join(texts).encode(encoding))
    assert [prompt.text for prompt in data.load(str(path))] == [text.strip() for text in texts]


@FILES
@given(
    rows=st.lists(st.tuples(lines, st.dictionaries(lines, json_values, max_size=3)), min_size=1, max_size=5)
)
def test_a_jsonl_file_comes_back_with_its_metadata(
    tmp_path: Path, rows: list[tuple[str, dict[str, object]]]
) -> None:
    path = tmp_path / "file.jsonl"
    records = [{key: value for key, value in row.items() if key != "prompt"} for _, row in rows]
    path.write_text(
        "\n".join(json.dumps(r | {"prompt": text}) for (text, _), r in zip(rows, records, strict=True))
    )
    loaded = data.load(str(path))
    assert [(prompt.text, dict(prompt.metadata)) for prompt in loaded] == [
        (text.strip(), record) for (text, _), record in zip(rows, records, strict=True)
    ]


@given(length=st.integers(1, 60), n=st.integers(1, 60), seed=st.integers(0, 2**63 - 1), shuffle=st.booleans())
def test_batches_never_repeat_a_row_and_epochs_never_either(
    length: int, n: int, seed: int, shuffle: bool
) -> None:
    prompts = [data.Prompt(row, str(row)) for row in range(length)]
    if n > length:
        with pytest.raises(DataError):
            data.batch(prompts, 0, n, seed, shuffle)
        return
    epoch = [[p.row for p in data.batch(prompts, i, n, seed, shuffle)] for i in range(length // n)]
    flat = [row for rows in epoch for row in rows]
    assert len(set(flat)) == len(flat) == length // n * n


@given(st.text(), json_values)
def test_a_target_is_a_normal_text_or_none(prompt: str, target: object) -> None:
    for metadata in ({}, {"target": target}):
        found = target_of(prompt, metadata)
        assert found is None or (found and normalise(found) == found)


@given(st.text(max_size=30), st.text(min_size=1, max_size=10))
def test_the_edit_score_is_one_exactly_for_the_target(reading: str, target: str) -> None:
    score = edit_score(reading, target)
    assert 0 <= score <= 1
    assert (score == 1) == (reading == target)


@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_the_soft_score_is_a_probability_per_character(seed: int, steps: int, target: list[int]) -> None:
    probabilities = np.random.default_rng(seed).dirichlet(np.full(4, 0.3), size=steps).astype(np.float32)
    score = soft_score(probabilities.reshape(steps, 4), [[label] for label in target])
    assert 0 <= score <= 1
    needed = len(target) + sum(a == b for a, b in itertools.pairwise(target))
    assert (score == 0) == (steps < needed)
