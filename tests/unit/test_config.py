"""The configuration tree: what it takes, and what it says to the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotlight import config
from spotlight.errors import ConfigError, NotFoundError
from spotlight.rl.sampler import rollout_sampler


@pytest.mark.parametrize("recipe", config.recipes())
def test_every_shipped_recipe_loads_and_survives_a_round_trip(recipe: str, tmp_path: Path) -> None:
    loaded = config.load(recipe)
    path = tmp_path / "saved.yaml"
    path.write_text(config.dump(loaded))
    assert config.load(path) == loaded


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lrr=1", "did you mean 'train.lr'"),
        ("lr=1", "did you mean 'train.lr'"),
        ("trian.lr=1", "did you mean 'train'"),
        ("train.lr=fast", "train.lr"),
        ("train.lr=nan", "finite"),
        ("train.lr=-1", "greater than 0"),
        ("train=3", "train"),
        ("train.lr.deep=3", "is a value"),
        ("seed=-1", "greater than or equal to 0"),
        ("sampler.noise_level=0", "nothing is explored"),
        ("sampler.window_size=9", "step 9 of 4"),
        ("sampler.window_size=4", "step 4 of 4"),
        ("sampler.window_start=3", "step 4 of 4"),
        ("sampler={window_start: 2, window_size: 2}", "step 4 of 4"),
        ("sampler={kind: cps, noise_level: 1.5}", "subtract noise"),
        ("sampler.steps=1", "nothing is explored"),
        ("explore.draft_steps=[2, 0]", "explore.draft_steps.1"),
        ("cluster.start_with=9", "there are 2 spot nodes"),
        ("cluster.dead_after_s=0.5", "at least two heartbeats"),
        ("no sign", "bad override"),
        ("=1", "bad override"),
        ("seed={a: &x 1, b: *x}", "aliases"),
        ("seed=[", "--set seed"),
    ],
)
def test_a_bad_override_is_one_clear_error(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load("tiny", [override])
    told = f"{caught.value.message} {caught.value.hint}"
    assert words in told
    assert len(caught.value.message.splitlines()) <= 5


@pytest.mark.parametrize(
    ("start", "size"), [(0, 0), (0, 1), (0, 3), (1, 2), (2, 1), (2, 0), (1, 0), (3, 0), (0, 4), (4, 0)]
)
def test_a_window_is_taken_exactly_where_the_sampler_can_draw_noise_in_it(start: int, size: int) -> None:
    try:
        loaded = config.load("tiny", [f"sampler.window_start={start}", f"sampler.window_size={size}"])
    except ConfigError:
        taken = False
    else:
        taken = True
    last = start + size - 1 if size else max(start, 2)
    assert taken == (last < 3)
    if taken:
        sampler = rollout_sampler(loaded.sampler)
        assert [step for step in range(4) if sampler.coefficients[step].std] == list(range(start, last + 1))


def test_overrides_reach_their_key_and_later_ones_win() -> None:
    loaded = config.load("tiny", ["train.lr=1e-3", "seed=0", "train.lr=2e-3", "reward.train={ocr: 1}"])
    assert loaded.train.lr == 2e-3
    assert loaded.seed == 0
    assert loaded.reward.train == {"ocr": 1.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a: 1\na: 2\n", "duplicate key"),
        (b"- 1\n", "mapping"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"a: [" * 5000, "deep"),
        (b"seed: " + b"9" * 5000, "digits"),
        (b"seed: 2020-13-01\n", "month"),
        (b"? [a, b]\n: 3\n", "a key must be a word"),
        (b"1: 2\n", "should be strings"),
        (b"seed: yes\n", "no numbers"),
        (b"seed: 1\n---\nseed: 2\n", "single document"),
        (b"iterations: !!python/object:os.system {}\n", "could not determine a constructor"),
    ],
)
def test_yaml_that_is_no_recipe_is_refused(text: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        config.load(path)


def test_a_byte_order_mark_and_an_empty_file_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbfseed: 7\r\n")
    assert config.load(path).seed == 7
    path.write_bytes(b"")
    assert config.load(path) == config.RunConfig()


def test_a_huge_recipe_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"#" * (config.MAX_RECIPE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        config.load(path)


def test_unknown_recipes_name_the_near_miss_and_missing_files_the_path() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load("tinny")
    assert "tiny" in str(caught.value.hint)
    with pytest.raises(NotFoundError, match=r"nowhere\.yaml"):
        config.load("nowhere.yaml")
