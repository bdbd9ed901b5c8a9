"""Optimizer state as tensors and JSON: training goes on as if it had never stopped, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spotlight.errors import IntegrityError
from spotlight.store.checkpoint import load_latest, save
from spotlight.store.tree import flatten, unflatten

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1 + 0.2, betas=(0.9, 1 / 3)),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "lr as tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), capturable=False, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "two groups": lambda p: torch.optim.Adam([{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)]),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_training_is_the_same_to_the_bit(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    make, model = OPTIMIZERS[name], nn.Linear(3, 2)
    optimizer = make(list(model.parameters()))
    steps(model, optimizer, 0, 3)
    tensors, skeleton = flatten(optimizer.state_dict())
    save(tmp_path, 3, {"model": model.state_dict(), "optimizer": tensors}, {"optimizer": skeleton})

    found = load_latest(tmp_path)
    assert found
    restored = unflatten(found.tensors["optimizer"], found.meta["optimizer"])
    assert same(restored, optimizer.state_dict())
    again = nn.Linear(3, 2)
    again.load_state_dict(found.tensors["model"])
    other = make(list(again.parameters()))
    other.load_state_dict(restored)
    assert steps(again, other, 3, 3) == steps(model, optimizer, 3, 3)


def test_scheduler_and_rng_states(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    tree = {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state(), "none": [None, True, "é", ()]}
    tensors, skeleton = flatten(tree)
    assert same(unflatten(tensors, json.loads(json.dumps(skeleton))), tree)


def test_no_name_clashes() -> None:
    tree = {
        "a": {"b": torch.ones(1)},
        "a.b": torch.zeros(1),
        "a_b": torch.ones(2),
        1: [torch.ones(3)],
        "1": 2,
    }
    tensors, skeleton = flatten(tree)
    assert len(tensors) == 4
    assert same(unflatten(tensors, json.loads(json.dumps(skeleton))), tree)


@pytest.mark.parametrize("bad", [{"f": print}, {1.5: 0}, [{None: 1}], {"s": {1, 2}}, b"x", object()])
def test_what_json_cannot_hold_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="cannot store a"):
        flatten(bad)


@pytest.mark.parametrize(
    "skeleton",
    [{}, {"tensor": "none"}, {"tensor": ["x"]}, {"set": [1]}, {"list": 1}, {"dict": [1]}, {"a": 1, "b": 2},
     {"dict": [[[1], 2]]}, {"dict": None}],
)  # fmt: skip
def test_a_broken_skeleton_is_refused(skeleton: Any) -> None:
    with pytest.raises(IntegrityError, match="broken state tree"):
        unflatten({}, skeleton)
