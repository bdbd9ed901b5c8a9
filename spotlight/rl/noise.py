"""All randomness of the RL side, keyed by what it is for and never by where or when it is drawn.

The noise of a sample is a function of (run seed, prompt row, seed, step) alone: not of rank, batch, chunk,
worker, sequence-parallel degree or restart. It is drawn on the CPU in fp32 at the full latent shape, before
any sharding.

The generator is numpy's Philox with a 128-bit key. torch's CPU generator keeps only the low 32 bits of its
seed, so a run of a million draws would contain about a hundred pairs of equal noises; its normal sampler also
differs between vector instruction sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

INITIAL = -1  # the step whose noise is the initial latent


def generator(purpose: str, *key: int) -> np.random.Generator:
    """A fresh generator for `purpose` and a tuple of integers; different keys give independent streams."""
    text = "/".join([purpose, *(str(int(part)) for part in key)])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(_Key(digest)))  # type: ignore[arg-type]


def initial_noise(run_seed: int, row: int, seed: int, shape: Sequence[int]) -> Tensor:
    """The initial latent of a sample, fp32, `shape` without a batch dimension."""
    return _normal(shape, "sample", run_seed, row, seed, INITIAL)


def step_noise(run_seed: int, row: int, seed: int, step: int, shape: Sequence[int]) -> Tensor:
    """The z of one stochastic denoising step (counted from 0), fp32, `shape` without a batch dimension."""
    if step < 0:
        raise ValueError(f"denoising steps are counted from 0, got {step}")
    return _normal(shape, "sample", run_seed, row, seed, step)


def forward_noise(run_seed: int, row: int, seed: int, update: int, step: int, shape: Sequence[int]) -> Tensor:
    """The eps of a forward-process training point, apart from every noise that samples are made with."""
    return _normal(shape, "forward", run_seed, row, seed, update, step)


class _Key(ISeedSequence):
    """128 bits as Philox's key. `Philox(key=...)` gathers entropy first, only to throw it away: three times slower."""

    def __init__(self, digest: bytes) -> None:
        self._words = np.frombuffer(digest, "<u8")

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """The two words that Philox asks for."""
        assert (n_words, np.dtype(dtype)) == (2, np.dtype(np.uint64))
        return self._words


def _normal(shape: Sequence[int], purpose: str, *key: int) -> Tensor:
    return torch.from_numpy(generator(purpose, *key).standard_normal(tuple(shape), dtype=np.float32))
