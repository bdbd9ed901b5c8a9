"""Results of samples: written once per (sample, weights version), by whoever commits first.

Leases are the first fence against a worker that is late; this is the second. A zombie's write of the same
sample finds the name taken: equal bytes count as done, others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

from torch import Tensor

from spotlight.errors import FencedError, IntegrityError
from spotlight.store.objects import ObjectStore
from spotlight.store.tensors import pack, unpack

if TYPE_CHECKING:
    from spotlight.core.types import SampleId

__all__ = ["Artifacts", "pack", "unpack"]


class Artifacts:
    """Samples' tensors in an object store, under `{prefix}/it1/row2/s3/v{weights version}.safetensors`."""

    def __init__(self, store: ObjectStore, prefix: str = "artifacts") -> None:
        self._store = store
        self._prefix = prefix

    def put(self, sample: SampleId, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Store the result and return its digest; writing the same again is fine.

        FencedError if another result is there already: the caller's lease has passed.
        """
        data, key = pack(tensors), self._key(sample, version)
        if self._store.put_new(key, data) is None and self._store.get(key).data != data:
            raise FencedError(f"{key} is already written, with other content")
        return _digest(data)

    def get(self, sample: SampleId, version: int, *, digest: str | None = None) -> dict[str, Tensor]:
        """Read a result, checked against the `digest` that was committed. NotFoundError, IntegrityError."""
        key = self._key(sample, version)
        data = self._store.get(key).data
        if digest is not None and _digest(data) != digest:
            raise IntegrityError(f"{key} has digest {_digest(data)}, committed was {digest}")
        return unpack(data)

    def discard(self, iteration: int) -> int:
        """Delete all results of an iteration, uncommitted ones too; return how many."""
        keys = self._store.list_keys(f"{self._prefix}/it{iteration}")
        for key in keys:
            self._store.delete(key)
        return len(keys)

    def _key(self, sample: SampleId, version: int) -> str:
        return f"{self._prefix}/{sample}/v{version}.safetensors"


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
