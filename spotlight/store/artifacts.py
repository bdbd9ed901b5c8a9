"""Results of samples, each under its own digest, so that nobody can ever overwrite anybody's.

Leases are the first fence against a worker that is late; this is the second. Two workers that made the same sample
(one died before its commit, one is a zombie) leave two objects where their bits differ, as they may on a GPU. Which
one counts is what was committed: its digest is the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

from torch import Tensor

from spotlight.errors import IntegrityError
from spotlight.store.objects import ObjectStore
from spotlight.store.tensors import pack, unpack

if TYPE_CHECKING:
    from spotlight.core.types import SampleId

__all__ = ["Artifacts", "pack", "unpack"]


class Artifacts:
    """Samples' tensors in an object store, under `{prefix}/it1/row2/s3/v{weights version}-{digest}.safetensors`."""

    def __init__(self, store: ObjectStore, prefix: str = "artifacts") -> None:
        self._store = store
        self._prefix = prefix

    def put(self, sample: SampleId, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Store a result and return its digest; writing the same again is fine. IntegrityError: not finite."""
        data = pack(tensors)
        digest = _digest(data)
        self._store.put_new(self._key(sample, version, digest), data)
        return digest

    def get(self, sample: SampleId, version: int, digest: str) -> dict[str, Tensor]:
        """Read the result that was committed under `digest`. NotFoundError, IntegrityError."""
        key = self._key(sample, version, digest)
        data = self._store.get(key).data
        if _digest(data) != digest:
            raise IntegrityError(f"{key} has digest {_digest(data)}, committed was {digest}")
        return unpack(data)

    def discard(self, iteration: int) -> int:
        """Delete all results of an iteration, uncommitted ones too; return how many."""
        keys = self._store.list_keys(f"{self._prefix}/it{iteration}")
        for key in keys:
            self._store.delete(key)
        return len(keys)

    def _key(self, sample: SampleId, version: int, digest: str) -> str:
        return f"{self._prefix}/{sample}/v{version}-{digest}.safetensors"


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
