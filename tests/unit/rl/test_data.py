"""Prompt files: what is read, what is refused with file and line, and which rows an iteration gets."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from spotlight.errors import DataError
from spotlight.rl import data

# The split is part of the shipped checkpoint: another one would show it held-out strings.
HELD_OUT_FIRST = ["778", "334", "271"]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def texts(source: str) -> list[str]:
    return [prompt.text for prompt in data.load(source)]


def test_builtin_digits_split_all_three_digit_strings() -> None:
    train, held_out = data.load("builtin:digits-train"), data.load("builtin:digits-held-out")
    assert (len(train), len(held_out)) == (800, 200)
    assert {p.text for p in train} | {p.text for p in held_out} == {f"{i:03d}" for i in range(1000)}
    assert [p.row for p in train] == list(range(800))
    assert all(p.metadata == {"target": p.text} for p in train)
    assert [p.text for p in held_out[:3]] == HELD_OUT_FIRST


def test_builtin_shapes_are_geneval_prompts_of_all_six_kinds_and_held_out_ones_are_apart() -> None:
    train, held_out = data.load("builtin:shapes-train"), data.load("builtin:shapes-held-out")
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}
    assert len({prompt.text for prompt in train + held_out}) == len(train + held_out)
    kinds = {"single_object", "two_object", "counting", "colors", "color_attr", "position"}
    assert {p.metadata["tag"] for p in train} == {p.metadata["tag"] for p in held_out} == kinds
    assert data.load("builtin:shapes-train") == train
    by_text = {prompt.text: prompt.metadata for prompt in train + held_out}
    assert by_text["three red squares"] == {
        "tag": "counting",
        "include": [{"class": "square", "count": 3, "color": "red"}],
        "exclude": [{"class": "square", "count": 4}],
    }
    assert by_text["a blue square left of a red triangle"] == {
        "tag": "position",
        "include": [
            {"class": "triangle", "count": 1, "color": "red"},
            {"class": "square", "count": 1, "color": "blue", "position": ["left of", 0]},
        ],
    }


def test_unknown_builtin_names_the_near_miss() -> None:
    with pytest.raises(DataError, match="digits-trian") as caught:
        data.load("builtin:digits-trian")
    assert "builtin:digits-train" in str(caught.value.hint)


@pytest.mark.parametrize(
    "content",
    [
        "one\ntwo\n",
        "one\ntwo",
        "one\r\ntwo\r\n",
        "one\rtwo\r",
        "\n  \none  \n\n\ttwo\t\n\n",
        codecs.BOM_UTF8 + b"one\r\ntwo",
        "one\r\ntwo\n".encode("utf-16"),
        codecs.BOM_UTF16_BE + "one\ntwo".encode("utf-16-be"),
        "one\ntwo".encode("utf-32"),
    ],
)
def test_text_files_of_every_origin_read_the_same(tmp_path: Path, content: str | bytes) -> None:
    assert texts(write(tmp_path / "p.txt", content)) == ["one", "two"]


def test_only_line_ends_end_lines(tmp_path: Path) -> None:
    line = "form\x0cfeed, next\x85line, paragraph\u2029separator"
    assert texts(write(tmp_path / "p.txt", line)) == [line]
    assert texts(write(tmp_path / "p.jsonl", json.dumps({"prompt": line}, ensure_ascii=False))) == [line]


def test_a_long_line_is_read_and_an_absurd_one_refused(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "p.txt", "x" * 1951)) == ["x" * 1951]
    with pytest.raises(DataError, match=r"p\.txt:2: .*30000"):
        data.load(write(tmp_path / "p.txt", "fine\n" + "x" * 30_000))


def test_equal_prompts_stay_different_rows(tmp_path: Path) -> None:
    prompts = data.load(write(tmp_path / "p.txt", "A cat\na cat\na cat\n"))
    assert [(p.row, p.text) for p in prompts] == [(0, "A cat"), (1, "a cat"), (2, "a cat")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "no prompts"),
        ("p.txt", b"\n \n\r\n", "no prompts"),
        ("p.txt", b"good\nb\xe9d\n", r"p\.txt:2: not UTF-8 at byte 6"),
        ("p.txt", codecs.BOM_UTF16_LE + b"a\x00\n\x00b", r"p\.txt:2: not UTF-16"),
        ("p.txt", "one\ntwo".encode("utf-16-le"), r"p\.txt:1: NUL"),
        ("p.jsonl", '{"prompt": "a"}\n[1, 2]\n', r"p\.jsonl:2: .*not list"),
        ("p.jsonl", '{"prompt": "a"}\n\nnot json', r"p\.jsonl:3: not JSON"),
        ("p.jsonl", '{"prompt": "a", "x": NaN}', r"p\.jsonl:1: metadata that is no JSON"),
        ("p.jsonl", '{"prompt": "a", "x": 1e999}', r"p\.jsonl:1: metadata that is no JSON"),
        ("p.jsonl", '{"promt": "a"}', r"p\.jsonl:1: no `prompt`; there is promt"),
        ("p.jsonl", "{}", r"p\.jsonl:1: no `prompt`"),
        ("p.jsonl", '{"prompt": 7}', r"p\.jsonl:1: .*not a text but int"),
        ("p.jsonl", '{"prompt": null}', r"p\.jsonl:1: .*NoneType"),
        ("p.jsonl", '{"prompt": "  "}', r"p\.jsonl:1: the prompt is empty"),
        ("p.jsonl", r'{"prompt": "half \ud83d"}', r"p\.jsonl:1: .*surrogate"),
        ("p.jsonl", "[" * 100_000, r"p\.jsonl:1: not JSON"),
        ("p.csv", "text,target\na,b\n", r"p\.csv:2: no `prompt`; there is text, target"),
        ("p.csv", "prompt,target\na,b,c\n", r"p\.csv:2: not as many fields"),
        ("p.csv", "prompt,target\na,b\nc\n", r"p\.csv:3: not as many fields"),
        ("p.csv", 'prompt\n"open', r"p\.csv:\d: not CSV"),
        ("p.csv", "prompt\n", "no prompts"),
        ("p.parquet", b"no parquet at all", "not parquet"),
        ("p.xlsx", b"", "unknown kind"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        data.load(write(tmp_path / name, content))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    for name in ("none.txt", "folder.txt"):
        with pytest.raises(DataError, match=f"{name}: cannot be read"):
            data.load(str(tmp_path / name))


def test_jsonl_keeps_geneval_metadata(tmp_path: Path) -> None:
    record = {
        "tag": "counting",
        "include": [{"class": "cup", "count": 2}],
        "exclude": [{"class": "cup", "count": 3}],
    }
    line = json.dumps(record | {"prompt": "a photo of two cups"})
    (prompt,) = data.load(write(tmp_path / "p.jsonl", line + "\n"))
    assert prompt == data.Prompt(0, "a photo of two cups", record)


def test_csv_with_quotes_and_line_breaks(tmp_path: Path) -> None:
    content = '\ufeffprompt,target\r\n"a sign, ""HI""",HI\r\n\r\n"two\nlines",x\r\n'
    prompts = data.load(write(tmp_path / "p.csv", content))
    assert [(p.text, p.metadata) for p in prompts] == [
        ('a sign, "HI"', {"target": "HI"}),
        ("two\nlines", {"target": "x"}),
    ]


def test_parquet_leaves_bytes_behind(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"prompt": ["a", "b"], "image": [b"\x00", b"\x01"], "tags": [["x"], []]})
    pq.write_table(table, tmp_path / "p.parquet")
    prompts = data.load(str(tmp_path / "p.parquet"))
    assert [(p.text, p.metadata) for p in prompts] == [("a", {"tags": ["x"]}), ("b", {"tags": []})]


def test_parquet_metadata_that_json_does_not_have_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"prompt": ["a", "b"], "score": [1.0, float("nan")]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet:2: metadata that is no JSON"):
        data.load(str(tmp_path / "p.parquet"))


def rows(count: int) -> list[data.Prompt]:
    return [data.Prompt(row, str(row)) for row in range(count)]


def test_an_epoch_has_every_row_once_and_the_next_another_order() -> None:
    prompts = rows(24)
    epochs = [[p.row for i in range(3) for p in data.batch(prompts, 3 * e + i, 8, seed=1)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
    assert epochs[0] != epochs[1]


def test_a_batch_depends_on_iteration_and_seed_alone() -> None:
    prompts = rows(100)
    assert data.batch(prompts, 7, 8, seed=3) == data.batch(prompts, 7, 8, seed=3)
    assert data.batch(prompts, 7, 8, seed=3) != data.batch(prompts, 7, 8, seed=4)


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_row_twice_in_a_batch_even_across_epochs(shuffle: bool) -> None:
    prompts = rows(10)
    for iteration in range(40):
        chosen = [p.row for p in data.batch(prompts, iteration, 8, seed=0, shuffle=shuffle)]
        assert len(set(chosen)) == 8


def test_every_row_is_trained_on_when_the_file_does_not_divide() -> None:
    prompts = rows(10)
    for shuffle in (True, False):
        met = {p.row for i in range(40) for p in data.batch(prompts, i, 8, seed=0, shuffle=shuffle)}
        assert met == set(range(10))


def test_unshuffled_goes_around_the_file() -> None:
    chosen = [[p.row for p in data.batch(rows(5), i, 3, seed=9, shuffle=False)] for i in range(3)]
    assert chosen == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


@pytest.mark.parametrize("n", [0, 11])
def test_a_batch_larger_than_the_file_is_refused(n: int) -> None:
    with pytest.raises(DataError, match="the file has 10"):
        data.batch(rows(10), 0, n, seed=0)
