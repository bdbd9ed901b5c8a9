"""Tensors as bytes: exact round trips, and refusal of whatever is broken or hostile."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from spotlight.errors import IntegrityError
from spotlight.store.tensors import Spec, digest, pack, unpack

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def file(header: object, data: bytes = b"", *, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(shape: list, start: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_is_exact(dtype: torch.dtype) -> None:
    tensor = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)
    again = unpack(pack({"x": tensor, "scalar": tensor[0, 0, 1], "none": tensor[:, :0]}))
    assert again["x"].dtype == dtype
    assert again["scalar"].shape == ()
    assert again["none"].shape == (2, 0, 4)
    assert again["x"].view(torch.uint8).equal(tensor.view(torch.uint8))


def test_views_and_shared_memory() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"all": base, "same": base, "t": base.T, "row": base[1], "every": base[:, ::2], "p": base[0]}
    again = unpack(pack(tensors))
    assert sorted(again) == list(again) == sorted(tensors)
    for name, tensor in tensors.items():
        assert again[name].equal(tensor)
    assert digest(again) == digest(tensors)


def test_signs_of_zero_and_nan_bits_survive() -> None:
    bits = torch.tensor([0x7FC00001, -(2**31), 0x7F800000], dtype=torch.int32)
    again = unpack(pack({"x": bits.view(torch.float32)}), finite=False)
    assert again["x"].view(torch.int32).equal(bits)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_not_finite_is_refused_by_name(value: float, dtype: torch.dtype) -> None:
    bad = torch.zeros(5, dtype=dtype)
    bad[2] = value
    with pytest.raises(IntegrityError, match="tensor b holds 1 values"):
        unpack(pack({"a": torch.ones(2), "b": bad}))


def test_nan_in_eight_bits() -> None:
    with pytest.raises(IntegrityError, match="not finite"):
        unpack(pack({"x": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)}))


def test_expectations() -> None:
    data = pack({"a": torch.ones(2, 3), "b": torch.ones(1)})
    spec = {"a": Spec((2, 3), "float32"), "b": Spec((1,), "float32")}
    assert unpack(data, expect=spec)
    with pytest.raises(IntegrityError, match=r"a is float32\[2, 3\], not float32\[3, 2\]"):
        unpack(data, expect=spec | {"a": Spec((3, 2), "float32")})
    with pytest.raises(IntegrityError, match="not bfloat16"):
        unpack(data, expect=spec | {"b": Spec((1,), "bfloat16")})
    with pytest.raises(IntegrityError, match="missing c; unexpected none"):
        unpack(data, expect=spec | {"c": Spec((1,), "float32")})
    with pytest.raises(IntegrityError, match="1 of 1 tensors match; missing none; unexpected b"):
        unpack(data, expect={"a": spec["a"]})


def test_limit() -> None:
    data = pack({"a": torch.ones(1000)})
    assert unpack(data, limit_bytes=len(data))
    with pytest.raises(IntegrityError, match="at most"):
        unpack(data, limit_bytes=len(data) - 1)


def test_every_truncation_is_refused() -> None:
    data = pack({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)})
    for end in range(len(data)):
        with pytest.raises(IntegrityError):
            unpack(data[:end])
    with pytest.raises(IntegrityError):
        unpack(data + b"\0")


HOSTILE = {
    "empty": b"",
    "header longer than the file": file({}, size=10**6),
    "header of 2^63": file({}, size=2**63),
    "header of 2^64 - 1": file({}, size=2**64 - 1),
    "not JSON": file(b"{not json}"),
    "not UTF-8": file(b'{"\xff": 1}'),
    "deep": file(b"[" * 100_000),
    "a list": file([1, 2]),
    "no tensors": file({"__metadata__": {"a": "b"}}),
    "zero tensors": file({}),
    "twice": file(b'{"a":%b,"a":%b}' % ((json.dumps(entry([1], 0, 4)).encode(),) * 2), b"\0" * 4),
    "size of 2^64": file({"a": entry([2**32, 2**32], 0, 0)}),
    "negative": file({"a": entry([-1], 0, 4)}, b"\0" * 4),
    "fraction": file({"a": entry([1.5], 0, 4)}, b"\0" * 4),
    "outside": file({"a": entry([2], 0, 8)}, b"\0" * 4),
    "backwards": file({"a": entry([1], 4, 0)}, b"\0" * 4),
    "overlap": file({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"\0" * 4),
    "hole": file({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12),
    "shape does not fit": file({"a": entry([3], 0, 4)}, b"\0" * 4),
    "unknown dtype": file({"a": entry([1], 0, 4, "OBJ")}, b"\0" * 4),
    "dtype that torch lacks here": file({"a": entry([2], 0, 1, "F4")}, b"\0"),
    "no fields": file({"a": {}}),
    "a number": file({"a": 1}),
    "name with a newline": file({"a\nb": entry([1], 0, 4)}, b"\0" * 4),
    "name too long": file({"a" * 600: entry([1], 0, 4)}, b"\0" * 4),
    "empty name": file({"": entry([1], 0, 4)}, b"\0" * 4),
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused(name: str) -> None:
    with pytest.raises(IntegrityError):
        unpack(HOSTILE[name])


def test_a_huge_header_is_refused_before_it_is_parsed() -> None:
    header = json.dumps({"a": entry([1], 0, 4)}).encode()
    assert unpack(file(header + b" " * 1000, b"\0" * 4))
    with pytest.raises(IntegrityError, match="at most 16777216 are read"):
        unpack(file(header + b" " * (16 << 20), b"\0" * 4))


def test_nothing_or_bad_names_are_not_packed() -> None:
    for tensors in ({}, {"": torch.ones(1)}, {"a\n": torch.ones(1)}, {"x" * 513: torch.ones(1)}):
        with pytest.raises(IntegrityError):
            pack(tensors)


def test_digest_tells_apart() -> None:
    one = torch.ones(4)
    different = [
        {"a": one},
        {"b": one},
        {"a": one.reshape(2, 2)},
        {"a": one.to(torch.bfloat16)},
        {"a": one.view(torch.int32)},
        {"a": one, "b": one},
        {"a": torch.zeros(4)},
        {"a": -torch.zeros(4)},
        {"a": torch.ones(5)},
        {},
    ]
    assert len({digest(tensors) for tensors in different}) == len(different)
    assert digest({"a": one, "b": -one}) == digest({"b": -one, "a": one.clone().requires_grad_()})
    assert digest({"a": torch.arange(6).reshape(2, 3).T}) == digest(
        {"a": torch.arange(6).reshape(2, 3).T.contiguous()}
    )
