"""S3, GCS and memory as object stores, through obstore.

Retries are obstore's own: jittered, exponential, bounded in number and time; on 5xx, conflicts and broken or
slow connections. A request that succeeded may thus be sent again and meet its own result. Each write carries
a random `writer` mark, so that case is told apart from another writer's success.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import obstore.exceptions as failures
from obstore.store import GCSStore, MemoryStore, S3Store

from spotlight.errors import CredentialError, IntegrityError, NotFoundError, RunError
from spotlight.store.objects import LIMIT_BYTES, Blob, check_key

_HINT = "log in (`aws configure`, `gcloud auth application-default login`) or ask for read and write access"
# Without any login obstore asks the machine's metadata server for a role; off a cloud that fails like this.
_NO_LOGIN = ("169.254.169.254", "metadata.google.internal", "InvalidAccessKeyId", "SignatureDoesNotMatch")


@dataclass(frozen=True, slots=True)
class Retries:
    """How long to try: each request `timeout_s`, at most `count` repeats, none later than `total_s`."""

    count: int = 8
    first_s: float = 0.1
    ceiling_s: float = 15.0
    total_s: float = 180.0
    timeout_s: float = 120.0

    def client(self) -> dict[str, Any]:
        """obstore's keyword arguments."""
        backoff = {
            "init_backoff": timedelta(seconds=self.first_s),
            "max_backoff": timedelta(seconds=self.ceiling_s),
            "base": 2,
        }
        retry = {
            "max_retries": self.count,
            "backoff": backoff,
            "retry_timeout": timedelta(seconds=self.total_s),
        }
        limits = {"timeout": timedelta(seconds=self.timeout_s), "connect_timeout": timedelta(seconds=5)}
        return {"retry_config": retry, "client_options": limits}


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
    if scheme == "memory":
        return Bucket(MemoryStore(), "memory://")
    kind: Any = S3Store if scheme == "s3" else GCSStore
    login = {} if credentials is None else {"credential_provider": credentials}
    options = (retries or Retries()).client()
    options["client_options"] |= {"allow_http": _plain_http(config)} | config.pop("client_options", {})
    store = kind(bucket, prefix=prefix or None, **options, **login, **config)
    return Bucket(store, f"{scheme}://{bucket}/{prefix}".rstrip("/"))


def _plain_http(config: dict[str, Any]) -> bool:
    """Whether the user named an endpoint without TLS (a server of their own)."""
    named = config.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT", "")
    return str(named).startswith("http://")


class Bucket:
    """`ObjectStore` over an obstore store. A tag is the service's ETag and generation."""

    def __init__(self, store: Any, url: str) -> None:
        self.url = url
        self._store = store

    def get(self, key: str, *, limit_bytes: int = LIMIT_BYTES) -> Blob:
        """See `ObjectStore.get`."""
        with _service_errors(self.url, check_key(key)):
            found = self._store.get(key)
            size = found.meta["size"]
            if size > limit_bytes:
                raise IntegrityError(f"{key} in {self.url} has {size} bytes, at most {limit_bytes} are read")
            return Blob(bytes(found.bytes()), _tag(found.meta))

    def put_new(self, key: str, data: bytes) -> str | None:
        """See `ObjectStore.put_new`."""
        return self._put(key, data, "create")

    def put_if(self, key: str, data: bytes, tag: str) -> str | None:
        """See `ObjectStore.put_if`."""
        return self._put(key, data, json.loads(tag))

    def list_keys(self, prefix: str = "") -> list[str]:
        """See `ObjectStore.list_keys`."""
        with _service_errors(self.url, prefix):
            pages = self._store.list(check_key(prefix) if prefix else None)
            return sorted(item["path"] for page in pages for item in page)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        try:
            with _service_errors(self.url, check_key(key)):
                self._store.delete(key)
        except NotFoundError:
            return

    def _put(self, key: str, data: bytes, mode: Any) -> str | None:
        writer = uuid.uuid4().hex
        with _service_errors(self.url, check_key(key)):
            try:
                done = self._store.put(
                    key, data, mode=mode, attributes={"writer": writer}, use_multipart=False
                )
            except (failures.AlreadyExistsError, failures.PreconditionError):
                return self._own(key, writer)
            except FileNotFoundError as error:
                if mode == "create" or "NoSuchBucket" in str(error):
                    raise
                return None  # S3 answers 404 to a conditional write of an object that is gone
        return _tag(done)

    def _own(self, key: str, writer: str) -> str | None:
        """The tag if what is there was written by this very call, whose first reply was lost; else None."""
        try:
            found = self._store.get(key)
        except FileNotFoundError:
            return None
        return _tag(found.meta) if found.attributes.get("writer") == writer else None


def _tag(meta: Any) -> str:
    return json.dumps({name: meta[name] for name in ("e_tag", "version") if meta[name] is not None})


@contextmanager
def _service_errors(url: str, key: str) -> Iterator[None]:
    """Turn what the service says into what the user can act on."""
    try:
        yield
    except FileNotFoundError as error:
        raise _not_found(url, key, error) from error
    except (failures.PermissionDeniedError, failures.UnauthenticatedError) as error:
        raise CredentialError(f"{url} refuses access to {key}", hint=_HINT) from error
    except failures.BaseError as error:
        if "NoSuchBucket" in str(error):  # listing reports it so
            raise _not_found(url, key, error) from error
        if any(sign in str(error) for sign in _NO_LOGIN):
            raise CredentialError(f"no valid login for {url}", hint=_HINT) from error
        raise RunError(
            f"{url} failed at {key}: {_brief(error)}", hint="the service or the network is down"
        ) from error


def _not_found(url: str, key: str, error: BaseException) -> NotFoundError:
    if "NoSuchBucket" in str(error):
        return NotFoundError(f"no such bucket: {url}", hint="create it, or correct the name")
    return NotFoundError(f"no object {key} in {url}")


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split("Debug source")[0].split())[:300]
