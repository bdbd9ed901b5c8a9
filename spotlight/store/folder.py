"""A local folder as an object store.

A write is staged in a hidden file, synced, then linked (create-only) or renamed (replace) into place, so a
reader sees the old object or the new one, and a kill or a power cut leaves at worst a hidden file. Commits
take one lock file, which the kernel releases when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from spotlight.errors import IntegrityError, NotFoundError, RunError
from spotlight.names import inside
from spotlight.store.objects import LIMIT_BYTES, Blob, check_key

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ABANDONED_S = 3600.0  # a staged file this old belongs to a writer that died


class LocalFolder:
    """`ObjectStore` over a folder, which is made on the first write. Safe for many processes of one machine.

    A tag is the digest of the content.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.url = str(root)

    def get(self, key: str, *, limit_bytes: int = LIMIT_BYTES) -> Blob:
        """See `ObjectStore.get`."""
        with _os_errors(self.url, key), self._path(key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise IntegrityError(f"{key} in {self.url} has {size} bytes, at most {limit_bytes} are read")
            data = file.read()
        return Blob(data, _tag(data))

    def put_new(self, key: str, data: bytes) -> str | None:
        """See `ObjectStore.put_new`."""
        with self._staged(key, data) as (staged, path), self._locked():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(staged, path)
            except FileExistsError:
                return None
            self._sync_folders(path)
        return _tag(data)

    def put_if(self, key: str, data: bytes, tag: str) -> str | None:
        """See `ObjectStore.put_if`."""
        with self._staged(key, data) as (staged, path), self._locked():
            try:
                if _tag(path.read_bytes()) != tag:
                    return None
            except FileNotFoundError:
                return None
            staged.replace(path)
            self._sync_folders(path)
        return _tag(data)

    def list_keys(self, prefix: str = "") -> list[str]:
        """See `ObjectStore.list_keys`."""
        top = self._path(prefix) if prefix else self.root
        found: list[str] = []
        for folder, folders, files in os.walk(top):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [os.path.join(folder, name) for name in files if not name.startswith(".")]
        return sorted(Path(path).relative_to(self.root).as_posix() for path in found)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`. Folders that become empty go too."""
        path = self._path(key)
        if not path.exists():
            return
        with _os_errors(self.url, key), self._locked():
            path.unlink(missing_ok=True)
            for folder in self._folders(path)[:-1]:
                try:
                    folder.rmdir()
                except OSError:
                    break

    def _path(self, key: str) -> Path:
        """The file of `key`; UserError if the key, or a symbolic link on its way, leaves the folder."""
        inside(self.root, check_key(key))
        return self.root / key

    def _folders(self, path: Path) -> list[Path]:
        """The folders of `path` from its own up to the root."""
        depth = len(path.relative_to(self.root).parts)
        return list(path.parents)[:depth]

    @contextmanager
    def _staged(self, key: str, data: bytes) -> Iterator[tuple[Path, Path]]:
        """Yield (a synced hidden file with `data`, the path of `key`); the hidden file is gone afterwards."""
        path = self._path(key)
        with _os_errors(self.url, key, len(data)):
            folder = self.root / ".staged"
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            staged = folder / uuid.uuid4().hex
            try:
                with staged.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                yield staged, path
            finally:
                staged.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _sync_folders(self, path: Path) -> None:
        """Make the new name durable, and the names of folders that were made for it."""
        for folder in self._folders(path):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _tag(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _sweep(folder: Path) -> None:
    """Remove what writers left that were killed long ago."""
    for entry in folder.iterdir():
        try:
            if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                entry.unlink()
        except FileNotFoundError:
            continue  # its writer, or another sweep, was faster


@contextmanager
def _os_errors(url: str, key: str, size_bytes: int = 0) -> Iterator[None]:
    """Turn what the disk says into what the user can act on."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise NotFoundError(f"no object {key} in {url}") from error
    except OSError as error:
        if error.errno in _NO_ROOM:
            free = shutil.disk_usage(url).free
            raise RunError(
                f"no room in {url} for {key}: {size_bytes} bytes to write, {free} free",
                hint="free some space or raise the quota; what was stored before is untouched",
            ) from error
        raise RunError(
            f"{url}: {error.strerror} at {key}", hint="check that the folder is there and may be written"
        ) from error
