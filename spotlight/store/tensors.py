"""Tensors as bytes and back: safetensors, checked on the way in, and one digest for all of them.

Bytes may come from a node that died half-way, a disk that lost a bit, or somebody hostile, so nothing is
believed before it is checked and nothing in them can run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NoReturn

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from spotlight.errors import IntegrityError

LIMIT_BYTES = 4 << 30
"""The largest set of tensors `unpack` takes unless told otherwise."""

_HEADER_LIMIT_BYTES = 16 << 20  # a 20-billion-parameter transformer's header has 0.3 MB
_MAX_NAME = 512


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor must be: shape and dtype (torch's name without the prefix, e.g. 'bfloat16')."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """The spec that `tensor` meets."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Safetensors bytes of dense tensors from any device. IntegrityError on none or a bad name."""
    if not tensors:
        raise IntegrityError("no tensors to store")
    for name in tensors:
        _check_name(name)
    return safetensors.torch.save(_own_storage(tensors))


def unpack(
    data: bytes,
    *,
    expect: Mapping[str, Spec] | None = None,
    finite: bool = True,
    limit_bytes: int = LIMIT_BYTES,
) -> dict[str, Tensor]:
    """The tensors in `data`, on the CPU, names sorted.

    IntegrityError if the bytes are truncated, oversized or malformed, hold no tensor, hold a value that is
    not finite (unless `finite` is False), or differ from `expect` in any name, shape or dtype.
    """
    if len(data) > limit_bytes:
        raise IntegrityError(f"{len(data)} bytes of tensors, at most {limit_bytes} are taken")
    _check_header(data)
    try:
        loaded = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise IntegrityError(f"not valid safetensors: {str(error)[:200]}") from error
    tensors = {name: loaded[name] for name in sorted(loaded)}
    if expect is not None:
        check_specs(tensors, expect)
    if finite:
        check_finite(tensors)
    return tensors


def digest(tensors: Mapping[str, Tensor]) -> str:
    """32 hex digits of blake2b over every name, dtype, shape and byte, in order of names.

    Equal on all devices and layouts; -0.0 and 0.0 differ, as do two dtypes of equal values.
    """
    total = blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        spec = Spec.of(tensor)
        total.update(json.dumps([name, spec.dtype, spec.shape]).encode() + b"\n")
        # A copy: memory that numpy has looked at can never be resized, as FSDP does with what it gathers.
        own = tensor.to("cpu", copy=True).contiguous()
        total.update(own.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def check_specs(tensors: Mapping[str, Tensor], expect: Mapping[str, Spec]) -> None:
    """IntegrityError naming what is missing, unexpected, or of another shape or dtype."""
    check_names(tensors, expect)
    for name, want in expect.items():
        got = Spec.of(tensors[name])
        if got != want:
            raise IntegrityError(
                f"tensor {name} is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
            )


def check_names(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """IntegrityError that counts and names tensors on one side only."""
    missing, extra = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
    if missing or extra:
        raise IntegrityError(
            f"{len(got.keys() & want.keys())} of {len(want)} tensors match; "
            f"missing {_some(missing)}; unexpected {_some(extra)}",
            hint="were the names changed on one side only (a prefix, an adapter's name)?",
        )


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """IntegrityError naming the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            wide = tensor.float() if tensor.element_size() == 1 else tensor  # isfinite lacks the 8-bit floats
            bad = int((~torch.isfinite(wide)).sum())
            if bad:
                raise IntegrityError(f"tensor {name} holds {bad} values that are not finite")


def _own_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory, as safetensors demands."""
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        storage = flat.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != flat.nbytes:
            flat = flat.clone()
        seen.add(flat.untyped_storage().data_ptr())
        own[name] = flat
    return own


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise IntegrityError(f"bad tensor name {str(name)[:60]!r}")


def _check_header(data: bytes) -> None:
    """Look at the header before anything is allocated from it; the library checks offsets and sizes."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise IntegrityError(f"truncated tensors: {len(data)} bytes, a header of {size} promised")
    if size > _HEADER_LIMIT_BYTES:
        raise IntegrityError(f"tensor header of {size} bytes, at most {_HEADER_LIMIT_BYTES} are read")
    try:
        header = json.loads(data[8 : 8 + size], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"tensor header is not JSON: {str(error)[:100]}") from error
    names = [name for name in header if name != "__metadata__"] if isinstance(header, dict) else []
    if not names:
        raise IntegrityError("tensor file holds no tensors")
    for name in names:
        _check_name(name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _twice([name for name, _ in pairs])
    return found


def _twice(names: list[str]) -> NoReturn:
    name = next(name for name in names if names.count(name) > 1)
    raise IntegrityError(f"tensor header names {name[:60]!r} twice")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
