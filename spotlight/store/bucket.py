"""S3, GCS and memory as object stores, through obstore.

Retries are ours: obstore never repeats a conditional write that timed out, and takes S3's 409 (another write
is in flight, ask again) for "exists". A write whose reply was lost may thus be sent twice and meet its own
result, so each carries a random `writer` mark that tells this case from another writer's success.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import obstore.exceptions as failures
from obstore.store import GCSStore, MemoryStore, S3Store

from spotlight.errors import CredentialError, IntegrityError, NotFoundError, RunError
from spotlight.store.objects import LIMIT_BYTES, Blob, check_key

_HINT = "log in (`aws configure`, `gcloud auth application-default login`) or ask for read and write access"
# Without any login obstore asks the machine's metadata server for a role; off a cloud that fails like this.
_NO_LOGIN = (
    "/latest/api/token",
    "/latest/meta-data/",
    "/computeMetadata/",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
)
_NO_LOGIN_RETRIES = 2
_STATUS = re.compile(r"status code: (\d{3})")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Retries:
    """How long to try: each request `timeout_s`, at most `count` repeats, none begun after `total_s`.

    The pause before repeat i is uniform in [0, min(ceiling_s, first_s 2^i)], so that nodes which failed
    together do not come back together.
    """

    count: int = 8
    first_s: float = 0.2
    ceiling_s: float = 15.0
    total_s: float = 180.0
    timeout_s: float = 120.0

    def pause_s(self, repeat: int, rng: random.Random) -> float:
        """The pause before the given repeat (0, 1, ...)."""
        return rng.uniform(0.0, min(self.ceiling_s, self.first_s * 2.0**repeat))


def open_bucket(
    scheme: str,
    bucket: str,
    prefix: str,
    *,
    credentials: Callable[[], Any] | None = None,
    retries: Retries | None = None,
    **config: Any,
) -> Bucket:
    """Open `s3`, `gs` or `memory`; `config` is obstore's (endpoint, region, ...) beside the environment's."""
    retries = retries or Retries()
    if scheme == "memory":
        return Bucket(MemoryStore(), "memory://", retries)
    client = {
        "timeout": timedelta(seconds=retries.timeout_s),
        "connect_timeout": timedelta(seconds=min(5.0, retries.timeout_s)),
        "allow_http": _plain_http(config),
    }
    login = {} if credentials is None else {"credential_provider": credentials}
    kind: Any = S3Store if scheme == "s3" else GCSStore
    store = kind(
        bucket,
        prefix=prefix or None,
        client_options=client,
        retry_config={"max_retries": 0},
        **login,
        **config,
    )
    return Bucket(store, f"{scheme}://{bucket}/{prefix}".rstrip("/"), retries)


def _plain_http(config: dict[str, Any]) -> bool:
    """Whether the user named an endpoint without TLS (a server of their own)."""
    named = [config.get("endpoint"), config.get("base_url"), *map(os.environ.get, _ENDPOINTS)]
    return any(str(endpoint).startswith("http://") for endpoint in named)


class Bucket:
    """`ObjectStore` over an obstore store. A tag is the service's ETag and generation."""

    def __init__(self, store: Any, url: str, retries: Retries) -> None:
        self.url = url
        self._store = store
        self._retries = retries
        self._rng = random.Random()  # not the global one, which training seeds alike on every node

    def get(self, key: str, *, limit_bytes: int = LIMIT_BYTES) -> Blob:
        """See `ObjectStore.get`."""

        def read() -> Blob:
            found = self._store.get(key)
            size = found.meta["size"]
            if size > limit_bytes:
                raise IntegrityError(f"{key} in {self.url} has {size} bytes, at most {limit_bytes} are read")
            return Blob(bytes(found.bytes()), _tag(found.meta))

        return self._try(check_key(key), read)

    def put_new(self, key: str, data: bytes) -> str | None:
        """See `ObjectStore.put_new`."""
        return self._put(check_key(key), data, "create")

    def put_if(self, key: str, data: bytes, tag: str) -> str | None:
        """See `ObjectStore.put_if`."""
        return self._put(check_key(key), data, json.loads(tag))

    def list_keys(self, prefix: str = "") -> list[str]:
        """See `ObjectStore.list_keys`."""
        under = check_key(prefix) if prefix else None
        return self._try(
            prefix, lambda: sorted(item["path"] for page in self._store.list(under) for item in page)
        )

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""

        def remove() -> None:
            try:
                self._store.delete(key)
            except FileNotFoundError as error:
                if _no_bucket(error):
                    raise

        self._try(check_key(key), remove)

    def _put(self, key: str, data: bytes, mode: Any) -> str | None:
        mark = {"writer": uuid.uuid4().hex}

        def write() -> str | None:
            try:
                return _tag(self._store.put(key, data, mode=mode, attributes=mark, use_multipart=False))
            except (failures.AlreadyExistsError, failures.PreconditionError) as error:  # or it is gone
                if _status(error) == 409:
                    raise  # nothing is decided yet
                return self._own(key, mark["writer"])

        return self._try(key, write)

    def _own(self, key: str, writer: str) -> str | None:
        """The tag if what is there was written by this very call, whose first reply was lost; else None."""
        try:
            found = self._store.get(key)
        except FileNotFoundError as error:
            if _no_bucket(error):
                raise
            return None
        return _tag(found.meta) if found.attributes.get("writer") == writer else None

    def _try(self, key: str, action: Callable[[], _T]) -> _T:
        """Run `action`, and again after failures that may pass; translate the one that stays."""
        start_s, repeat = time.monotonic(), 0
        with _service_errors(self.url, key):
            while True:
                try:
                    return action()
                except failures.BaseError as error:
                    late = time.monotonic() - start_s > self._retries.total_s
                    if late or repeat >= min(self._retries.count, _useful_retries(error)):
                        raise
                time.sleep(self._retries.pause_s(repeat, self._rng))
                repeat += 1


def _tag(meta: Any) -> str:
    return json.dumps({name: meta[name] for name in ("e_tag", "version") if meta[name] is not None})


def _status(error: BaseException) -> int | None:
    """The HTTP status in the message, the only place where obstore gives it; None if no reply came."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _no_bucket(error: BaseException) -> bool:
    return "NoSuchBucket" in str(error)


def _no_login(error: BaseException) -> bool:
    return any(sign in str(error) for sign in _NO_LOGIN)


def _useful_retries(error: BaseException) -> float:
    """How often repeating can help: always while the service is busy or silent, never once it said no."""
    if _no_login(error):
        return _NO_LOGIN_RETRIES
    status = _status(error)
    passing = status is None or status in (408, 409, 429) or (status >= 500 and status != 501)
    return float("inf") if passing else 0


@contextmanager
def _service_errors(url: str, key: str) -> Iterator[None]:
    """Turn what the service says into what the user can act on."""
    try:
        yield
    except (failures.BaseError, FileNotFoundError) as error:
        raise _translated(error, url, key) from error


def _translated(error: Exception, url: str, key: str) -> NotFoundError | CredentialError | RunError:
    at = f" at {key}" if key else ""
    if _no_bucket(error):
        return NotFoundError(f"no such bucket: {url}", hint="create it, or correct the name")
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"no object {key} in {url}")
    if _no_login(error):
        return CredentialError(f"no valid login for {url}", hint=_HINT)
    if _status(error) in (401, 403):
        return CredentialError(f"{url} refuses access{at}", hint=_HINT)
    text = " ".join(str(error).split("Debug source")[0].split())[:300]
    return RunError(f"{url} failed{at}: {text}", hint="is the service up, and the network?")
