"""Base weights of a node: one flat file in shared memory that every process maps, so it is held once.

    {folder}/weights.bin      tensors back to back, each at a multiple of 64 bytes
    {folder}/manifest.json    offsets, shapes, dtypes, digest; the folder appears whole, by rename

Attaching costs milliseconds whatever the size, since nothing is read. The mapping is private (copy on write):
pages are shared until somebody writes, and a stray write changes the writer's copy, never a neighbour's.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from spotlight.errors import IntegrityError, NotFoundError, PreconditionError
from spotlight.store.tensors import Spec, check_names, digest

FORMAT = 1
_ALIGN = 64
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the file."""

    offset: int
    spec: Spec

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.spec.shape) * _DTYPES[self.spec.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """The manifest: which tensor lies where. `digest` is that of `store.tensors.digest`."""

    places: Mapping[str, Place]
    size_bytes: int
    digest: str

    @classmethod
    def of(cls, specs: Mapping[str, Spec], digest: str = "") -> Layout:
        """Tensors in order of names. IntegrityError for none or an unsupported dtype."""
        if not specs:
            raise IntegrityError("an arena needs at least one tensor")
        places, offset = {}, 0
        for name in sorted(specs):
            if specs[name].dtype not in _DTYPES:
                raise IntegrityError(f"tensor {name}: dtype {specs[name].dtype} cannot be held in an arena")
            places[name] = Place(offset, specs[name])
            offset += -(-places[name].num_bytes // _ALIGN) * _ALIGN
        return cls(places, offset, digest)

    def encode(self) -> bytes:
        """As JSON."""
        tensors = {
            name: {"offset": p.offset, "shape": list(p.spec.shape), "dtype": p.spec.dtype}
            for name, p in self.places.items()
        }
        body = {"format": FORMAT, "size_bytes": self.size_bytes, "digest": self.digest, "tensors": tensors}
        return json.dumps(body, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """From JSON. IntegrityError unless it is exactly the layout that `of` makes."""
        try:
            body: dict[str, Any] = json.loads(data)
            specs = {
                str(name): Spec(tuple(int(n) for n in entry["shape"]), str(entry["dtype"]))
                for name, entry in body["tensors"].items()
            }
            offsets = {name: int(entry["offset"]) for name, entry in body["tensors"].items()}
            found = cls.of(specs, str(body["digest"]))
            if body["format"] != FORMAT or any(n < 0 for spec in specs.values() for n in spec.shape):
                raise ValueError("unknown format or negative size")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"broken arena manifest: {error!r:.100}") from error
        if (
            offsets != {n: p.offset for n, p in found.places.items()}
            or body["size_bytes"] != found.size_bytes
        ):
            raise IntegrityError("broken arena manifest: offsets or size do not follow from the shapes")
        return found


def create(folder: Path, tensors: Mapping[str, Tensor]) -> Layout:
    """Put `tensors` into a new arena. PreconditionError if memory is short, IntegrityError if it exists."""
    layout = Layout.of({name: Spec.of(tensor) for name, tensor in tensors.items()}, digest(tensors))
    _write(folder, layout, tensors.__getitem__)
    return layout


def create_from_files(folder: Path, files: Sequence[Path]) -> Layout:
    """Put the tensors of safetensors files into a new arena, one at a time: never a second copy in memory.

    NotFoundError for a missing file; IntegrityError for a damaged one or a name that comes twice; else as
    `create`. The digest is left empty: hashing tens of GB takes minutes, and the files have their own.
    """
    source: dict[str, Path] = {}
    specs: dict[str, Spec] = {}
    for path in files:
        with _reading(path) as reader:
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                if name in source:
                    raise IntegrityError(f"tensor {name} is in {source[name].name} and in {path.name}")
                source[name] = path
                specs[name] = Spec.of(reader.get_tensor(name))  # mapped, not read

    def load(name: str) -> Tensor:
        with _reading(source[name]) as reader:
            return reader.get_tensor(name)

    layout = Layout.of(specs)
    _write(folder, layout, load)
    return layout


def attach(folder: Path) -> dict[str, Tensor]:
    """Map an arena: views into one private mapping. NotFoundError, or IntegrityError if it is damaged."""
    layout = read_layout(folder)
    path = folder / "weights.bin"
    if not path.is_file() or path.stat().st_size != layout.size_bytes:
        raise IntegrityError(f"{path}: not the {layout.size_bytes} bytes that the manifest promises")
    if layout.size_bytes == 0:
        return {
            name: torch.empty(p.spec.shape, dtype=_DTYPES[p.spec.dtype]) for name, p in layout.places.items()
        }
    flat = torch.from_file(str(path), shared=False, size=layout.size_bytes, dtype=torch.uint8)
    return {name: _view(flat, place) for name, place in layout.places.items()}


def read_layout(folder: Path) -> Layout:
    """The manifest of an arena. NotFoundError, or IntegrityError if it is damaged."""
    try:
        return Layout.decode((folder / "manifest.json").read_bytes())
    except FileNotFoundError:
        raise NotFoundError(f"no weights arena at {folder}") from None


def verify(folder: Path) -> None:
    """Read all of it. IntegrityError if the content is not what was written; without a digest, nothing."""
    layout = read_layout(folder)
    if layout.digest and (found := digest(attach(folder))) != layout.digest:
        raise IntegrityError(f"{folder}: weights have digest {found}, written was {layout.digest}")


def attach_or_create(folder: Path, fill: Callable[[], Sequence[Path]]) -> dict[str, Tensor]:
    """Map the node's arena; the first process to come fills it from `fill()`'s files, the others wait.

    A process that dies while filling lets the next one in: the lock is the kernel's.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "manifest.json").is_file():
            for abandoned in folder.parent.glob(f"{folder.name}.part-*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            create_from_files(folder, fill())
    return attach(folder)


def remove(folder: Path) -> None:
    """Delete an arena and its lock; processes that mapped it keep their pages. Missing is fine."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder.parent / f"{folder.name}.lock").unlink(missing_ok=True)


def assign(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make the arena's tensors the module's parameters and buffers, without a copy.

    IntegrityError if names or shapes differ, or anything is left without storage (a meta tensor).
    """
    state = module.state_dict()
    check_names(tensors, state)
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise IntegrityError(
                f"tensor {name} is {list(tensor.shape)}, the module's {list(state[name].shape)}"
            )
    module.load_state_dict(dict(tensors), strict=True, assign=True)
    empty = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    if empty:
        raise IntegrityError(f"{len(empty)} tensors have no values, first {empty[0]}")


def _write(folder: Path, layout: Layout, load: Callable[[str], Tensor]) -> None:
    part = folder.parent / f"{folder.name}.part-{os.getpid()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    part.mkdir()
    try:
        path = part / "weights.bin"
        _reserve(path, layout.size_bytes)
        if layout.size_bytes:
            flat = torch.from_file(str(path), shared=True, size=layout.size_bytes, dtype=torch.uint8)
            for name, place in layout.places.items():
                _view(flat, place).copy_(load(name).detach())
            del flat
        path.chmod(0o444)
        (part / "manifest.json").write_bytes(layout.encode())
        try:
            part.rename(folder)
        except OSError as error:
            raise IntegrityError(f"{folder} exists already", hint="remove it first") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _reserve(path: Path, size_bytes: int) -> None:
    """Claim the pages now: a full tmpfs would otherwise kill the process with SIGBUS while it copies."""
    with path.open("wb") as file:
        try:
            if size_bytes:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            free = shutil.disk_usage(path.parent).free
            raise PreconditionError(
                f"no room for {size_bytes / 1e9:.2f} GB of weights in {path.parent.parent}: "
                f"{free / 1e9:.2f} GB free",
                hint="give the node more shared memory (docker: --shm-size), or stop what holds it",
            ) from error


def _view(flat: Tensor, place: Place) -> Tensor:
    dtype = _DTYPES[place.spec.dtype]
    return flat[place.offset : place.offset + place.num_bytes].view(dtype).view(place.spec.shape)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as reader:
            yield reader
    except FileNotFoundError:
        raise NotFoundError(f"no weights file {path}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise IntegrityError(f"{path}: not valid safetensors: {str(error)[:160]}") from error
