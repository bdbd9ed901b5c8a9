import json
from collections import Counter

import pytest

from spotlight.core.prompts import PromptSampler


def test_an_epoch_meets_every_row_once():
    sampler = PromptSampler(50, seed=1)
    rows = [row for _ in range(10) for row in sampler.next_batch(5)]
    assert sorted(rows) == list(range(50))
    assert rows != sorted(rows)


def test_same_seed_same_batches():
    a, b = PromptSampler(20, seed=0), PromptSampler(20, seed=0)
    assert [a.next_batch(7) for _ in range(9)] == [b.next_batch(7) for _ in range(9)]
    assert PromptSampler(20, seed=1).next_batch(7) != PromptSampler(20, seed=0).next_batch(7)


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_no_row_twice_in_a_batch_also_across_epochs(size):
    sampler = PromptSampler(10, seed=3)
    for row in range(9):
        for _ in range(20):
            sampler.observe(row, zero_variance=True)
    for _ in range(60):
        batch = sampler.next_batch(size)
        assert len(set(batch)) == len(batch) == size


def test_prompts_without_variance_are_met_less_but_never_dropped():
    sampler = PromptSampler(100, seed=2)
    for row in range(50):
        for _ in range(12):
            sampler.observe(row, zero_variance=True)
    seen = Counter(row for _ in range(400) for row in sampler.next_batch(10))
    dull, lively = sum(seen[row] for row in range(50)), sum(seen[row] for row in range(50, 100))
    assert 0.02 < dull / lively < 0.1
    assert sampler.passed_over > 1000


def test_one_lively_group_brings_a_prompt_back():
    sampler = PromptSampler(3)
    for _ in range(5):
        sampler.observe(1, zero_variance=True)
    assert sampler.keep_probability(1) == pytest.approx(0.05)
    sampler.observe(1, zero_variance=False)
    assert sampler.keep_probability(1) == 1.0


def test_it_can_be_turned_off():
    sampler = PromptSampler(12, keep=1.0)
    for row in range(6):
        for _ in range(50):
            sampler.observe(row, zero_variance=True)
    assert set(Counter(row for _ in range(30) for row in sampler.next_batch(4)).values()) == {10}


def test_resume_goes_on_with_the_same_batches():
    sampler = PromptSampler(30, seed=4)
    for step in range(12):
        for row in sampler.next_batch(8):
            sampler.observe(row, zero_variance=row % 3 == step % 2)
    again = PromptSampler(30, seed=4)
    again.restore(json.loads(json.dumps(sampler.state())))
    assert [again.next_batch(8) for _ in range(20)] == [sampler.next_batch(8) for _ in range(20)]


@pytest.mark.parametrize(
    "bad", [{"num_rows": 0}, {"num_rows": 5, "keep": 0.0}, {"num_rows": 5, "floor": 1.5}]
)
def test_bad_arguments(bad):
    with pytest.raises(ValueError):
        PromptSampler(**bad)


@pytest.mark.parametrize("size", [0, 6])
def test_bad_batch_sizes(size):
    with pytest.raises(ValueError, match="a batch of"):
        PromptSampler(5).next_batch(size)
