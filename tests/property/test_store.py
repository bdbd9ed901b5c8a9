"""The store against plain models: a dict for stores, exact round trips, no bytes get through unchecked."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spotlight.errors import ConfigError, IntegrityError, NotFoundError, UserError
from spotlight.names import inside
from spotlight.store.checkpoint import require_same_config
from spotlight.store.objects import check_key, open_store
from spotlight.store.tensors import digest, pack, unpack
from spotlight.store.tree import flatten, unflatten

KEYS = st.sampled_from(["a/x", "a/y", "ab/x", "b", "c/d/e", "c/d/f"])
DATA = st.binary(max_size=3)


class Stores(RuleBasedStateMachine):
    """A folder and the memory store do what a dict does; tags are those of the last read."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.stores = [open_store(self.root), open_store("memory://")]
        self.model: dict[str, bytes] = {}
        self.read: dict[str, tuple[bytes, list[str]]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(key=KEYS, data=DATA)
    def put_new(self, key: str, data: bytes) -> None:
        created = [store.put_new(key, data) is not None for store in self.stores]
        assert created == [key not in self.model] * 2
        self.model.setdefault(key, data)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        if key not in self.model:
            for store in self.stores:
                with pytest.raises(NotFoundError):
                    store.get(key)
            return
        blobs = [store.get(key) for store in self.stores]
        assert [blob.data for blob in blobs] == [self.model[key]] * 2
        self.read[key] = (self.model[key], [blob.tag for blob in blobs])

    @rule(key=KEYS, data=DATA)
    def put_if(self, key: str, data: bytes) -> None:
        """Content-made tags (folder, S3) also match when the content went back to what was read."""
        if key not in self.read:
            return
        content, tags = self.read.pop(key)
        expected = self.model.get(key) == content
        changed = self.stores[0].put_if(key, data, tags[0]) is not None
        assert changed == expected
        if expected:
            self.model[key] = data
            tag = tags[1] if self.stores[1].get(key).tag == tags[1] else self.stores[1].get(key).tag
            assert self.stores[1].put_if(key, data, tag) is not None
        assert self.stores[1].put_if(key, b"never", tags[1]) is None

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        for store in self.stores:
            store.delete(key)
        self.model.pop(key, None)

    @invariant()
    def lists_agree(self) -> None:
        for prefix in ("", "a", "c", "c/d", "none"):
            wanted = sorted(key for key in self.model if not prefix or key.startswith(prefix + "/"))
            assert [store.list_keys(prefix) for store in self.stores] == [wanted] * 2


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@given(st.text(max_size=40))
def test_a_key_that_passes_stays_inside_and_is_itself(key: str) -> None:
    try:
        check_key(key)
    except UserError:
        return
    root = Path("/some/root")
    assert inside(root, key) == root / key
    assert str(root / key) == f"/some/root/{key}"
    assert not any(part.startswith(".") for part in key.split("/"))


NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable() and name != "__metadata__")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float16])
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype, seed = draw(SHAPES), draw(DTYPES), draw(st.integers(0, 99))
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


@given(st.dictionaries(NAMES, tensors(), min_size=1, max_size=5))
@settings(deadline=None)
def test_tensors_round_trip(given: dict[str, torch.Tensor]) -> None:
    data = pack(given)
    again = unpack(data)
    assert again.keys() == given.keys()
    assert digest(again) == digest(given)
    assert pack(again) == pack(dict(sorted(given.items())))


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        unpack(data)


GOOD = pack({"a": torch.arange(6.0), "b": torch.ones(2, 2, dtype=torch.int64)})


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=400)
def test_damaged_bytes_are_refused_or_well_formed(changes: list[tuple[int, int]]) -> None:
    """Damage may look like other tensors (digests tell those apart) but never crashes or reads outside."""
    bad = bytearray(GOOD)
    for position, value in changes:
        bad[position] = value
    try:
        got = unpack(bytes(bad))
    except IntegrityError:
        return
    assert sum(tensor.nbytes for tensor in got.values()) == 56


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
TREES = st.recursive(
    SCALARS | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return digest({"x": a}) == digest({"x": b})
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return type(a) is type(b) and a == b


@given(TREES)
@settings(deadline=None)
def test_trees_round_trip(tree: Any) -> None:
    flat, skeleton = flatten(tree)
    skeleton = json.loads(json.dumps(skeleton))
    assert same(unflatten(unpack(pack(flat), finite=False) if flat else {}, skeleton), tree)


CONFIGS = st.recursive(
    st.integers(0, 2) | st.booleans() | st.text(max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from("abc"), CONFIGS), st.dictionaries(st.sampled_from("abc"), CONFIGS))
def test_a_config_is_refused_exactly_when_it_differs(old: dict[str, Any], new: dict[str, Any]) -> None:
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        require_same_config(old, new)
    else:
        with pytest.raises(ConfigError):
            require_same_config(old, new)
    require_same_config(old, new, ["a", "b", "c"])
