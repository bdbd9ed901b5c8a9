"""What only Qwen-Image has: a blank as the unconditional prompt, and texts under a mask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import adapter_contract as contract


@pytest.fixture
def folder(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("qwen_image")


def test_the_unconditional_prompt_is_a_blank(folder: Path):
    adapter = contract.load(folder)
    empty, blank = adapter.encode([""]), adapter.encode([" "])
    assert empty["embeds"].equal(blank["embeds"])
    assert empty["mask"].all()


def test_texts_of_different_lengths_share_a_mask(folder: Path):
    cond = contract.load(folder).encode(contract.PROMPTS)
    lengths = cond["mask"].sum(dim=1).tolist()
    assert lengths[1] - lengths[0] == len(contract.PROMPTS[1]) - len(contract.PROMPTS[0])
