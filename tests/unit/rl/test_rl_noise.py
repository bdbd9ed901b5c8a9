from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.rl.noise import forward_noise, generator, initial_noise, step_noise

SHAPE = (2, 5, 7)
GOLDEN = [-1.1112943887710571, 0.20607315003871918]
KEY = st.integers(0, 2**63 - 1)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.numpy().tobytes(), digest_size=8).hexdigest()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(KEY, KEY, KEY, st.integers(0, 2000)), min_size=2, max_size=2, unique=True))
def test_different_keys_give_different_noise(keys):
    first, second = (step_noise(*key, SHAPE) for key in keys)
    assert not torch.equal(first, second)


@given(KEY, KEY, KEY, st.integers(0, 2000))
@settings(max_examples=50, deadline=None)
def test_equal_keys_give_equal_bits_whatever_was_drawn_before(run_seed, row, seed, step):
    first = step_noise(run_seed, row, seed, step, SHAPE)
    torch.randn(3)
    np.random.default_rng().standard_normal(3)
    assert torch.equal(first, step_noise(run_seed, row, seed, step, SHAPE))


def test_keys_are_not_cut_to_32_bits():
    # torch's own CPU generator does: seeds 5 and 5 + 2**32 give the same normals there
    assert not torch.equal(initial_noise(0, 0, 5, SHAPE), initial_noise(0, 0, 5 + 2**32, SHAPE))
    assert not torch.equal(initial_noise(0, 0, 5, SHAPE), initial_noise(2**32, 0, 5, SHAPE))


def test_no_two_of_many_samples_share_any_noise():
    seen = {
        digest(initial_noise(run, row, seed, (8,)))
        for run in range(2)
        for row in range(50)
        for seed in range(50)
    }
    seen |= {
        digest(step_noise(run, row, seed, step, (8,)))
        for run in range(2)
        for row in range(10)
        for seed in range(10)
        for step in range(10)
    }
    seen |= {digest(forward_noise(0, row, seed, 0, 0, (8,))) for row in range(50) for seed in range(50)}
    assert len(seen) == 5000 + 2000 + 2500


def test_digits_do_not_run_together():
    assert not torch.equal(step_noise(1, 23, 4, 5, SHAPE), step_noise(12, 3, 4, 5, SHAPE))
    assert not torch.equal(step_noise(0, 1, 11, 1, SHAPE), step_noise(0, 11, 1, 1, SHAPE))


def test_it_is_standard_normal_and_uncorrelated_between_keys():
    draws = torch.stack([initial_noise(7, 0, seed, (4096,)) for seed in range(64)]).double()
    assert draws.mean().abs() < 5 / (64 * 4096) ** 0.5
    assert abs(draws.var() - 1) < 0.02
    assert abs(draws.pow(4).mean() - 3) < 0.1
    correlation = torch.corrcoef(draws)
    assert (correlation - torch.eye(64)).abs().max() < 6 / 4096**0.5


def test_the_stream_is_the_same_in_another_process_and_forever():
    code = (
        "import torch; torch.manual_seed(9); from spotlight.rl.noise import *;"
        "print(step_noise(3, 14, 15, 9, (4,)).tolist())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(step_noise(3, 14, 15, 9, (4,)).tolist())
    assert step_noise(3, 14, 15, 9, (2,)).tolist() == GOLDEN  # a changed stream breaks every resume


def test_a_large_latent_is_fp32_on_the_cpu():
    noise = initial_noise(0, 0, 0, (16, 64, 64))
    assert noise.dtype == torch.float32
    assert noise.shape == (16, 64, 64)
    assert noise.device.type == "cpu"


def test_a_denoising_step_below_zero_is_misuse():
    with pytest.raises(ValueError, match="counted from 0"):
        step_noise(0, 0, 0, -1, SHAPE)


def test_purposes_are_apart():
    assert generator("a", 1).random() != generator("b", 1).random()
