"""Versions of weights: immutable, checked when read, and bound with every tensor counted."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spotlight.core.types import WeightVersion
from spotlight.errors import IntegrityError, NotFoundError
from spotlight.store.objects import open_store
from spotlight.store.weights import Weights, bind, live_parameters, probe


def tensors(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.w": torch.randn(3, 4, generator=rng).to(dtype) for i in range(3)}


class Adapted(nn.Module):
    """A frozen base and two trained matrices."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.zeros(2, 4, dtype=dtype))
        self.lora_b = nn.Parameter(torch.ones(4, 2, dtype=dtype))


SENT = {"lora_a": torch.full((2, 4), 0.5), "lora_b": torch.full((4, 2), 0.1)}


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(open_store(tmp_path))


def only_file(root: Path, n: int) -> Path:
    (found,) = (root / "weights" / f"v{n}").glob("*.safetensors")
    return found


def test_publish_and_fetch(weights: Weights) -> None:
    assert weights.latest() is None
    version = weights.publish(tensors(), 0, "tiny@1")
    assert version.num_tensors == 3
    assert weights.latest() == version == weights.manifest(0).version
    got = weights.fetch(0, base="tiny@1")
    assert all(got[name].equal(tensor) for name, tensor in tensors().items())
    assert probe(got) == version.digest


def test_versions_do_not_change(weights: Weights) -> None:
    first = weights.publish(tensors(), 4, "b")
    assert weights.publish(tensors(), 4, "b") == first
    for other, base in ((tensors(1), "b"), (tensors(), "c")):
        with pytest.raises(IntegrityError, match="v4 exist with other content"):
            weights.publish(other, 4, base)
    assert weights.fetch(4)["layer.0.w"].equal(tensors()["layer.0.w"])


def test_the_pointer_only_moves_forward(weights: Weights) -> None:
    for n in (2, 5, 3):
        weights.publish(tensors(n), n, "b")
    latest = weights.latest()
    assert latest
    assert latest.n == 5
    assert weights.fetch(3)


def test_another_base_is_refused(weights: Weights) -> None:
    weights.publish(tensors(), 1, "tiny@1")
    with pytest.raises(IntegrityError, match="belong to base 'tiny@1', loaded is 'tiny@2'"):
        weights.fetch(1, base="tiny@2")


def test_what_is_not_published_is_not_found(weights: Weights, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        weights.fetch(0)
    weights.publish(tensors(), 0, "b")
    (tmp_path / "weights/v0/manifest.json").unlink()
    with pytest.raises(NotFoundError):
        weights.fetch(0)


def test_a_publisher_that_died_half_way_is_no_obstacle(weights: Weights, tmp_path: Path) -> None:
    weights.publish(tensors(), 0, "b")
    (tmp_path / "weights/v0/manifest.json").unlink()
    (tmp_path / "weights/latest").unlink()
    only_file(tmp_path, 0).write_bytes(b"damaged meanwhile")
    version = weights.publish(tensors(), 0, "b")
    assert weights.latest() == version
    assert probe(weights.fetch(0)) == version.digest


def test_nothing_or_not_finite_is_not_published(weights: Weights) -> None:
    with pytest.raises(IntegrityError, match="no tensors"):
        weights.publish({}, 0, "b")
    with pytest.raises(IntegrityError, match="x holds 2 values that are not finite"):
        weights.publish({"x": torch.tensor([1.0, float("nan"), float("inf")])}, 0, "b")
    assert weights.latest() is None


def test_every_flipped_bit_and_every_truncation_is_noticed(weights: Weights, tmp_path: Path) -> None:
    weights.publish(tensors(), 0, "b")
    file = only_file(tmp_path, 0)
    good = file.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        file.write_bytes(bytes(bad))
        if position < len(good) - 144 and _same(weights):
            continue  # a flip in the header's padding or metadata changes no tensor
        with pytest.raises(IntegrityError, match="v0"):
            weights.fetch(0)
    for end in range(0, len(good), 7):
        file.write_bytes(good[:end])
        with pytest.raises(IntegrityError, match="v0"):
            weights.fetch(0)


def _same(weights: Weights) -> bool:
    try:
        got = weights.fetch(0)
    except IntegrityError:
        return False
    return probe(got) == probe(tensors())


ONE = {"a": {"shape": [1], "dtype": "float32"}}
GOOD = {"n": 0, "base": "b", "digest": "0" * 32, "num_tensors": 1, "tensors": ONE}
BROKEN = [
    "",
    "null",
    "[]",
    "{}",
    *map(
        json.dumps,
        [
            GOOD | {"num_tensors": 0, "tensors": {}},
            GOOD | {"num_tensors": 2},
            GOOD | {"n": 7},
            GOOD | {"n": -1},
            GOOD | {"n": "x"},
            GOOD | {"digest": "../../x"},
            GOOD | {"digest": None},
            GOOD | {"tensors": [1]},
            GOOD | {"tensors": {"a": {"shape": 3, "dtype": "float32"}}},
            GOOD | {"tensors": {"a": 1}},
        ],
    ),
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_manifest_is_refused(weights: Weights, tmp_path: Path, text: str) -> None:
    weights.publish(tensors(), 0, "b")
    (tmp_path / "weights/v0/manifest.json").write_text(text)
    with pytest.raises(IntegrityError):
        weights.fetch(0)


def test_a_broken_pointer_is_refused(weights: Weights, tmp_path: Path) -> None:
    weights.publish(tensors(), 0, "b")
    (tmp_path / "weights/latest").write_text('{"n": ')
    with pytest.raises(IntegrityError, match="broken weights pointer"):
        weights.latest()


def test_collect_keeps_the_last_and_clears_what_the_dead_left(weights: Weights, tmp_path: Path) -> None:
    assert weights.collect(2) == []
    for n in range(5):
        weights.publish(tensors(n), n, "b")
    (tmp_path / "weights/v1/manifest.json").unlink()
    assert weights.collect(2) == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["latest", "v3", "v4"]
    assert weights.fetch(3)
    with pytest.raises(NotFoundError):
        weights.fetch(2)
    with pytest.raises(ValueError):
        weights.collect(0)


def test_a_resumed_run_may_make_later_versions_again(weights: Weights, tmp_path: Path) -> None:
    for n in range(4):
        weights.publish(tensors(n), n, "b")
    weights.rewind(1)
    weights.rewind(1)
    assert (latest := weights.latest())
    assert latest.n == 1
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["latest", "v0", "v1"]
    again = weights.publish(tensors(22), 2, "b")
    assert probe(weights.fetch(2)) == again.digest


def test_two_heads_publish_one_number(tmp_path: Path) -> None:
    """Whoever wins, the version is whole; the other one is told."""
    for round_ in range(20):
        root, start = tmp_path / str(round_), threading.Barrier(2)

        def publish(seed: int, root: Path = root, start: threading.Barrier = start) -> WeightVersion | None:
            weights = Weights(open_store(root))
            start.wait()
            try:
                return weights.publish(tensors(seed), 1, "b")
            except IntegrityError:
                return None

        with ThreadPoolExecutor(2) as pool:
            (won,) = [version for version in pool.map(publish, range(2)) if version]
        assert probe(Weights(open_store(root)).fetch(1)) == won.digest


def test_bind_gives_the_digest_of_what_is_bound(weights: Weights) -> None:
    version = weights.publish(SENT, 1, "b")
    module = Adapted()
    before = probe(module)
    assert before != version.digest
    assert bind(module, weights.fetch(1)) == version.digest == probe(module)
    assert module.lora_a.equal(SENT["lora_a"])
    assert module.lora_a.requires_grad


def test_bind_to_named_parameters() -> None:
    module = Adapted()
    named = {f"adapter.{name}": p for name, p in live_parameters(module).items()}
    bind(named, {f"adapter.{name}": tensor for name, tensor in SENT.items()})
    assert probe(module) == probe(SENT)


def test_a_frozen_copy_binds_all_it_has() -> None:
    module = Adapted().requires_grad_(False)
    with pytest.raises(IntegrityError, match=r"2 of 4 tensors match; missing base\.bias, base\.weight"):
        bind(module, SENT)


BAD_SYNCS = {
    "prefix renamed": ({f"model.{k}": v for k, v in SENT.items()}, "0 of 2 .* unexpected model.lora_a"),
    "one missing": ({"lora_a": SENT["lora_a"]}, "1 of 2 tensors match; missing lora_b; unexpected none"),
    "one too many": ({**SENT, "lora_c": torch.ones(1)}, "unexpected lora_c"),
    "none": ({}, "0 of 2 tensors match; missing lora_a, lora_b"),
    "another shape": ({**SENT, "lora_b": torch.ones(2, 4)}, r"lora_b has shape \[2, 4\].*\[4, 2\]"),
    "broadcastable": ({**SENT, "lora_b": torch.ones(1)}, "lora_b has shape"),
    "bits would be lost": ({**SENT, "lora_b": torch.ones(4, 2).double()}, "would lose bits"),
}


@pytest.mark.parametrize("name", BAD_SYNCS)
def test_a_sync_that_does_not_fit_changes_nothing(name: str) -> None:
    sent, message = BAD_SYNCS[name]
    module = Adapted()
    before = probe(module)
    with pytest.raises(IntegrityError, match=message):
        bind(module, sent)
    assert probe(module) == before


def test_narrow_weights_bind_to_wide_parameters_exactly(weights: Weights) -> None:
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in SENT.items()}
    version = weights.publish(narrow, 1, "b")
    module = Adapted()
    assert bind(module, weights.fetch(1)) == version.digest
    assert module.lora_b.dtype == torch.float32


def test_two_float16_kinds_do_not_mix() -> None:
    with pytest.raises(IntegrityError, match="would lose bits"):
        bind(Adapted(torch.float16), {k: v.to(torch.bfloat16) for k, v in SENT.items()})


def test_parameters_that_share_memory_are_noticed() -> None:
    """What is bound is read back: a tied pair cannot hold two values."""
    shared = torch.zeros(2)
    with pytest.raises(IntegrityError, match="bound weights have digest"):
        bind({"a": shared, "b": shared}, {"a": torch.ones(2), "b": torch.zeros(2)})
