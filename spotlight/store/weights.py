"""Versions of the trained weights: immutable folders, one pointer that moves forward, a bind that counts.

    v{n}/{digest}.safetensors    the trained tensors (LoRA or all)
    v{n}/manifest.json           n, base, digest, all shapes and dtypes; written last: it makes the version
    latest                       the newest version, compare-and-set

Tensors are named by their digest, so of two publishers of one number (a head and its zombie) neither can put
its tensors under the other's manifest.

A sync that binds nothing trains for days on weights nobody sees, so `bind` compares names, shapes and, from
the live module, the digest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spotlight.core.types import WeightVersion
from spotlight.errors import IntegrityError, NotFoundError
from spotlight.store.objects import ObjectStore
from spotlight.store.tensors import Spec, check_finite, check_names, digest, pack, unpack

_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version promises. `base` names the weights that a LoRA belongs to."""

    version: WeightVersion
    base: str
    specs: dict[str, Spec]

    def encode(self) -> bytes:
        """As JSON."""
        tensors = {
            name: {"shape": list(spec.shape), "dtype": spec.dtype} for name, spec in self.specs.items()
        }
        body = {
            "n": self.version.n,
            "base": self.base,
            "digest": self.version.digest,
            "num_tensors": self.version.num_tensors,
            "tensors": tensors,
        }
        return json.dumps(body, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """From JSON. IntegrityError on anything that `encode` does not write."""
        try:
            body = json.loads(data)
            specs = {
                str(name): Spec(tuple(int(size) for size in spec["shape"]), str(spec["dtype"]))
                for name, spec in body["tensors"].items()
            }
            version = _version(body)
            manifest = cls(version, str(body["base"]), specs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"broken weights manifest: {error!r:.100}") from error
        if version.num_tensors != len(specs) or not specs:
            raise IntegrityError(
                f"weights manifest counts {version.num_tensors} tensors and lists {len(specs)}"
            )
        return manifest


class Weights:
    """Published versions in an object store."""

    def __init__(self, store: ObjectStore, prefix: str = "weights") -> None:
        self._store = store
        self._prefix = prefix

    def publish(self, tensors: Mapping[str, Tensor], n: int, base: str) -> WeightVersion:
        """Store version `n` and point `latest` at it. Doing it again with equal tensors is fine.

        IntegrityError if there are none, one is not finite, or version `n` exists with other content.
        """
        check_finite(tensors)
        data = pack(tensors)
        version = WeightVersion(n, digest(tensors), len(tensors))
        manifest = Manifest(version, base, {name: Spec.of(tensors[name]) for name in sorted(tensors)})
        self._put_tensors(self._tensors_key(version), data)
        if self._store.put_new(f"{self._folder(n)}/manifest.json", manifest.encode()) is None:
            self._refuse_other(manifest)
        self._point(version)
        return version

    def latest(self) -> WeightVersion | None:
        """The newest version, or None before the first."""
        try:
            pointer = self._store.get(f"{self._prefix}/latest").data
        except NotFoundError:
            return None
        return _pointed(pointer)

    def manifest(self, n: int) -> Manifest:
        """The manifest of version `n`. NotFoundError if it was not published or is collected."""
        manifest = Manifest.decode(self._store.get(f"{self._folder(n)}/manifest.json").data)
        if manifest.version.n != n:
            raise IntegrityError(f"weights v{n}: the manifest says v{manifest.version.n}")
        return manifest

    def fetch(self, n: int, *, base: str | None = None) -> dict[str, Tensor]:
        """The tensors of version `n`, digest, count, shapes and (if given) base checked; on the CPU.

        NotFoundError if there is no such version; IntegrityError if anything differs from the manifest.
        """
        manifest = self.manifest(n)
        if base is not None and manifest.base != base:
            raise IntegrityError(f"weights v{n} belong to base {manifest.base!r}, loaded is {base!r}")
        try:
            tensors = unpack(self._store.get(self._tensors_key(manifest.version)).data, expect=manifest.specs)
        except IntegrityError as error:
            raise IntegrityError(f"weights v{n}: {error.message}", hint=error.hint) from error
        found = digest(tensors)
        if found != manifest.version.digest:
            raise IntegrityError(f"weights v{n} have digest {found}, published was {manifest.version.digest}")
        return tensors

    def collect(self, keep: int) -> list[int]:
        """Delete all but the newest `keep` versions and what killed publishers left; return their numbers."""
        if keep < 1:
            raise ValueError("keep at least one version")
        latest = self.latest()
        old = [] if latest is None else [n for n in self._versions() if n < latest.n - keep + 1]
        for n in old:
            self._delete(n)
        return old

    def rewind(self, n: int) -> None:
        """Forget all versions after `n`: a resumed run makes them again, perhaps with other bits.

        For the holder of the run's lock only, before any node is admitted.
        """
        blob = self._store.get(f"{self._prefix}/latest")
        if self._store.put_if(f"{self._prefix}/latest", _pointer(self.manifest(n).version), blob.tag) is None:
            raise IntegrityError(f"someone else moved the weights pointer while it went back to v{n}")
        for later in self._versions():
            if later > n:
                self._delete(later)

    def _folder(self, n: int) -> str:
        return f"{self._prefix}/v{n}"

    def _tensors_key(self, version: WeightVersion) -> str:
        return f"{self._folder(version.n)}/{version.digest}.safetensors"

    def _versions(self) -> list[int]:
        """All numbers with any file, unpublished ones too."""
        names = {
            key.removeprefix(f"{self._prefix}/").split("/")[0] for key in self._store.list_keys(self._prefix)
        }
        return sorted(int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdigit())

    def _delete(self, n: int) -> None:
        self._store.delete(f"{self._folder(n)}/manifest.json")  # first: without it there is no such version
        for key in self._store.list_keys(self._folder(n)):
            self._store.delete(key)

    def _put_tensors(self, key: str, data: bytes) -> None:
        """Write the tensors unless they are there; what differs under their digest is damage, replaced."""
        if self._store.put_new(key, data) is None:
            blob = self._store.get(key)
            if blob.data != data:
                self._store.put_if(key, data, blob.tag)

    def _refuse_other(self, manifest: Manifest) -> None:
        there = self.manifest(manifest.version.n)
        if there != manifest:
            raise IntegrityError(
                f"weights v{there.version.n} exist with other content: "
                f"digest {there.version.digest}, not {manifest.version.digest}",
                hint="versions never change; after a resume call `rewind` first",
            )

    def _point(self, version: WeightVersion) -> None:
        """Move `latest` to `version` unless it is there or further."""
        key = f"{self._prefix}/latest"
        while self._store.put_new(key, _pointer(version)) is None:
            blob = self._store.get(key)
            if _pointed(blob.data).n >= version.n or self._store.put_if(key, _pointer(version), blob.tag):
                return


def live_parameters(module: nn.Module) -> dict[str, Tensor]:
    """What training moves: the parameters that require gradients, or all if none does (a frozen copy)."""
    named = dict(module.named_parameters())
    return {name: p for name, p in named.items() if p.requires_grad} or named


def probe(target: nn.Module | Mapping[str, Tensor]) -> str:
    """Digest of the live parameters: equal on two nodes exactly when they serve the same weights."""
    return digest(_live(target))


@torch.no_grad()
def bind(target: nn.Module | Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Copy `tensors` into the live parameters and return the digest of what is then bound, read back.

    `target` is a module (see `live_parameters`) or named parameters. Parameters of a wider dtype hold the
    sent values exactly; the digest is that of the values in the dtype sent, so it equals the version's.
    IntegrityError, and nothing is changed, if names or shapes differ in any way or the dtype would lose bits.
    """
    live = _live(target)
    check_names(tensors, live)
    for name, tensor in tensors.items():
        _check_fits(name, tensor, live[name])
    for name, tensor in tensors.items():
        live[name].copy_(tensor)
    bound, sent = digest({name: live[name].to(tensors[name].dtype) for name in tensors}), digest(tensors)
    if bound != sent:
        raise IntegrityError(f"bound weights have digest {bound}, sent was {sent}")
    return bound


def _live(target: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return live_parameters(target) if isinstance(target, nn.Module) else target


def _check_fits(name: str, sent: Tensor, live: Tensor) -> None:
    if sent.shape != live.shape:
        raise IntegrityError(
            f"tensor {name} has shape {list(sent.shape)}, the module's is {list(live.shape)}"
        )
    if torch.promote_types(sent.dtype, live.dtype) != live.dtype:
        raise IntegrityError(f"tensor {name} is {sent.dtype}, the module's {live.dtype} would lose bits")


def _pointer(version: WeightVersion) -> bytes:
    return json.dumps({"n": version.n, "digest": version.digest, "num_tensors": version.num_tensors}).encode()


def _version(body: Any) -> WeightVersion:
    """Raises ValueError, KeyError or TypeError on what `_pointer` does not write."""
    version = WeightVersion(int(body["n"]), str(body["digest"]), int(body["num_tensors"]))
    if version.n < 0 or not _DIGEST.fullmatch(version.digest):
        raise ValueError(f"version {version}")
    return version


def _pointed(data: bytes) -> WeightVersion:
    try:
        return _version(json.loads(data))
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"broken weights pointer: {data[:80]!r}") from error
