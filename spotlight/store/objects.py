"""Named bytes with two promises: a name is created once, and a change is made only to what was read.

Everything durable stands on these two: `put_new` (create-only) and `put_if` (compare-and-set), the same on a
local folder, S3, GCS and in memory. An outcome that a caller must expect comes back as None; what it cannot
help is raised: NotFoundError, CredentialError (403, no login), UserError (a key or URL that cannot be),
RunError (disk full, or the service still failing after bounded retries).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from spotlight.errors import ConfigError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_BYTES = 8 << 30
"""The largest object `get` reads into memory unless told otherwise."""

# A segment never starts with '.': no '..', no hidden file, and a local folder's own files stay out of reach.
_SEGMENT = re.compile(r"[A-Za-z0-9_=][A-Za-z0-9._=+-]{0,199}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_MAX_KEY = 900  # S3 allows 1024 bytes, the store's prefix included


@dataclass(frozen=True, slots=True)
class Blob:
    """An object as it was read: its bytes, and the tag that `put_if` compares (opaque to callers)."""

    data: bytes
    tag: str


class ObjectStore(Protocol):
    """Keys are `a/b/c` of letters, digits and `._=+-`; anything else is refused with UserError."""

    url: str

    def get(self, key: str, *, limit_bytes: int = LIMIT_BYTES) -> Blob:
        """Read one object. NotFoundError if it is not there, IntegrityError if larger than the limit."""
        ...

    def put_new(self, key: str, data: bytes) -> str | None:
        """Create `key` and return its tag, or None if it exists. Of many writers exactly one gets a tag."""
        ...

    def put_if(self, key: str, data: bytes, tag: str) -> str | None:
        """Replace `key` if its tag is still `tag`; return the new tag, or None if it changed or is gone."""
        ...

    def list_keys(self, prefix: str = "") -> list[str]:
        """All keys under the folder `prefix` (whole segments: 'v1' does not match 'v10/x'), sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove `key`; nothing happens if it is not there."""
        ...


def check_key(key: str) -> str:
    """Return `key` if every segment is plain. UserError otherwise: no '..', no '/x', no control character."""
    if len(key) > _MAX_KEY or not all(_SEGMENT.fullmatch(part) for part in key.split("/")):
        raise UserError(
            f"bad object key {key[:80]!r}",
            hint="segments of A-Z, a-z, 0-9 and '._=+-', not starting with '.', joined by '/'",
        )
    return key


def open_store(
    where: str | Path, *, credentials: Callable[[], Any] | None = None, **options: Any
) -> ObjectStore:
    """Open a folder path, `file:///path`, `s3://bucket/prefix`, `gs://bucket/prefix` or `memory://`.

    Buckets log in from the environment or the machine's role; `credentials` is an obstore credential provider
    for what those do not cover (profiles, SSO). `options` go to `bucket.open_bucket` (retries, time limits).
    Nothing is contacted yet. ConfigError on anything else.
    """
    text = str(where)
    scheme, found, rest = text.partition("://")
    if isinstance(where, Path) or not found:
        return _folder(Path(text))
    if scheme == "file":
        return _folder(Path(urlsplit(text).path))
    if scheme not in ("s3", "gs", "memory"):
        raise ConfigError(
            f"unknown storage {text[:80]!r}", hint="a folder, s3://bucket/prefix or gs://bucket/prefix"
        )

    from spotlight.store.bucket import open_bucket  # obstore only where a bucket is used

    bucket, _, prefix = rest.rstrip("/").partition("/")
    if scheme != "memory" and not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"bad bucket name in {text[:80]!r}", hint="s3://bucket/prefix")
    return open_bucket(
        scheme, bucket, check_key(prefix) if prefix else "", credentials=credentials, **options
    )


def _folder(path: Path) -> ObjectStore:
    from spotlight.store.folder import LocalFolder

    return LocalFolder(path)
