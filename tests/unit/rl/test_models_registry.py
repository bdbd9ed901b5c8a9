"""Conditioning as a value, and names to adapters."""

from __future__ import annotations

import pytest
import torch

from spotlight.config import ModelConfig
from spotlight.errors import ConfigError
from spotlight.rl.models import Conditioning, load_model


def make(count: int, length: int, start: int = 1) -> Conditioning:
    values = torch.arange(start, start + count * length).reshape(count, length)
    mask = torch.ones(count, length, dtype=torch.bool)
    return Conditioning({"embeds": values[..., None].float(), "mask": mask})


def test_index_takes_rows_in_order_and_repeatedly() -> None:
    cond = make(3, 2)
    assert cond.size == 3
    assert cond.index([2, 0, 2])["embeds"][:, 0, 0].tolist() == [5, 1, 5]


def test_repeat_keeps_a_group_together() -> None:
    assert make(2, 1).repeat(3)["embeds"].flatten().tolist() == [1, 1, 1, 2, 2, 2]


def test_cat_pads_with_what_a_mask_reads_as_absent() -> None:
    joined = Conditioning.cat([make(1, 3), make(2, 1, start=7)])
    assert joined.size == 3
    assert joined["embeds"][..., 0].tolist() == [[1, 2, 3], [7, 0, 0], [8, 0, 0]]
    assert joined["mask"].tolist() == [[True] * 3, [True, False, False], [True, False, False]]
    assert joined["mask"].dtype == torch.bool


def test_to_a_dtype_leaves_masks_alone() -> None:
    half = make(1, 2).to(torch.float16)
    assert (half["embeds"].dtype, half["mask"].dtype) == (torch.float16, torch.bool)
    assert half.to("cpu")["embeds"].device.type == "cpu"


def test_tensors_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="common first dimension"):
        Conditioning({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="common first dimension"):
        Conditioning({})
    with pytest.raises(ValueError, match="same tensor names"):
        Conditioning.cat([make(1, 1), Conditioning({"other": torch.zeros(1, 1)})])
    with pytest.raises(ValueError, match="same tensor names"):
        Conditioning.cat([])


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        ("tyni", "unknown model.kind 'tyni'", "did you mean 'tiny'"),
        ("zzz", "unknown model.kind 'zzz'", "known: "),
        ("no_such_module:load", "cannot import 'no_such_module'", "PYTHONPATH"),
        ("spotlight.rl.data:lode", "has no 'lode'", "spotlight.rl.data:load"),
        (":load", "cannot import ''", "PYTHONPATH"),
        (".relative:load", "cannot import", "PYTHONPATH"),
    ],
)
def test_an_unknown_adapter_names_the_near_miss(kind: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(ModelConfig(kind=kind))
    assert hint in str(caught.value.hint)
