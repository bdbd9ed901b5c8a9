"""Checkpoints that survive a kill at any byte, a full disk and a flipped bit.

    step-00000012-1a2b3c4d/{part}.safetensors    one file per part (model, optimizer, ema, ...)
    step-00000012-1a2b3c4d/manifest.json         digests and meta; written last: it makes the checkpoint

Every save has a folder of its own, so nothing valid is ever overwritten and what a killed save left is only
rubbish for the next save to clear. Works in any object store; parts are packed in memory one at a time.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from spotlight.errors import ConfigError, IntegrityError, NotFoundError, SpotlightError
from spotlight.store.objects import ObjectStore, open_store
from spotlight.store.tensors import pack, unpack

_FOLDER = re.compile(r"step-(\d{8})-[0-9a-f]{8}")
_PART = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FORMAT = 1
_LIMIT_BYTES = 256 << 30


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What `load_latest` found; `skipped` says which newer ones were not valid, and why."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    meta: dict[str, Any]
    skipped: tuple[str, ...]


def save(
    where: ObjectStore | Path | str,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    meta: Mapping[str, Any],
    *,
    keep: int = 2,
) -> str:
    """Write one checkpoint, then clear all but the `keep` newest steps up to it; return the folder's name.

    `tensors` maps parts to named tensors (a part may be empty), `meta` is anything JSON can hold. If this
    raises (disk full, service down), the checkpoints from before are all still there and valid.
    """
    if keep < 1 or not 0 <= step < 10**8 or not all(_PART.fullmatch(part) for part in tensors):
        raise ValueError(f"bad checkpoint: {keep=}, {step=}, parts {sorted(tensors)}")
    store = _store(where)
    folder = f"step-{step:08d}-{uuid.uuid4().hex[:8]}"
    try:
        parts = {part: _put_part(store, f"{folder}/{part}.safetensors", tensors[part]) for part in tensors}
        body = json.dumps({"format": _FORMAT, "step": step, "parts": parts, "meta": meta}, allow_nan=True)
        manifest = json.dumps({"digest": _digest(body.encode()), "body": body})
        _put(store, f"{folder}/manifest.json", manifest.encode())
    except BaseException:
        _clear_after_failure(store, folder)
        raise
    _prune(store, folder, keep)
    return folder


def load_latest(where: ObjectStore | Path | str) -> Checkpoint | None:
    """The newest valid checkpoint, or None where there is none at all.

    Truncated, corrupt and unfinished ones are passed over and named in `skipped`. IntegrityError if every
    one is; CredentialError and RunError if the storage cannot be read, so an outage never loses progress.
    """
    store = _store(where)
    skipped: list[str] = []
    for folder in sorted(_folders(store), reverse=True):
        try:
            step, tensors, meta = _load(store, folder)
        except NotFoundError:
            skipped.append(f"{folder}: unfinished, a file is missing")
        except IntegrityError as error:
            skipped.append(f"{folder}: {error.message}")
        else:
            return Checkpoint(step, tensors, meta, tuple(skipped))
    if skipped:
        raise IntegrityError(
            "no valid checkpoint: " + "; ".join(skipped)[:600], hint="start the run anew under another name"
        )
    return None


def load(where: ObjectStore | Path | str, step: int | None = None) -> Checkpoint:
    """The checkpoint of `step`, or the newest; no other in its place.

    NotFoundError if there is none, naming those that there are; IntegrityError if it is damaged or unfinished.
    """
    store = _store(where)
    folders = _folders(store)
    wanted = sorted(name for name, of in folders.items() if step is None or of == step)
    if not wanted:
        there = ", ".join(map(str, sorted(set(folders.values())))) or "none"
        what = "no checkpoint yet" if step is None else f"no checkpoint of iteration {step}"
        raise NotFoundError(what, hint=f"there are: {there}")
    try:
        found, tensors, meta = _load(store, wanted[-1])
    except (NotFoundError, IntegrityError) as error:
        raise IntegrityError(f"{wanted[-1]}: {error.message}", hint="choose an older checkpoint") from None
    return Checkpoint(found, tensors, meta, ())


def require_same_config(
    saved: Mapping[str, Any], current: Mapping[str, Any], may_change: Collection[str] = ()
) -> None:
    """ConfigError naming each key (dotted) that differs, except those in or under `may_change`."""
    changed = [
        f"{key} was {_shown(old)}, is {_shown(new)}"
        for key, old, new in _differences(_plain(saved), _plain(current))
        if not any(key == free or key.startswith(free + ".") for free in may_change)
    ]
    if changed:
        more = f" (and {len(changed) - 5} more)" if len(changed) > 5 else ""
        raise ConfigError(
            "cannot resume with a changed config: " + "; ".join(changed[:5]) + more,
            hint="set it back, or start a new run; free to change: "
            + (", ".join(sorted(may_change)) or "nothing"),
        )


_MISSING = object()


def _differences(old: Any, new: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(
                old.get(key, _MISSING), new.get(key, _MISSING), f"{at}.{key}" if at else key
            )
    elif old != new or isinstance(old, bool) != isinstance(new, bool):  # True == 1 in Python, not in a config
        yield at, old, new


def _plain(tree: Mapping[str, Any]) -> Any:
    """As it looks after a round trip through a file: tuples are lists, keys are strings."""
    return json.loads(json.dumps(tree))


def _shown(value: Any) -> str:
    return "absent" if value is _MISSING else json.dumps(value)[:60]


def _store(where: ObjectStore | Path | str) -> ObjectStore:
    return open_store(where) if isinstance(where, str | Path) else where


def _folders(store: ObjectStore) -> dict[str, int]:
    """Folders of checkpoints, finished or not, and their steps."""
    names = {key.split("/")[0] for key in store.list_keys()}
    return {name: int(match[1]) for name in names if (match := _FOLDER.fullmatch(name))}


def _put_part(store: ObjectStore, key: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Write one part; return its digest, or None for a part without tensors, which has no file."""
    if not tensors:
        return None
    data = pack(tensors)
    _put(store, key, data)
    return _digest(data)


def _put(store: ObjectStore, key: str, data: bytes) -> None:
    if store.put_new(key, data) is None:
        raise IntegrityError(f"{key} appeared while it was being written")


def _load(store: ObjectStore, folder: str) -> tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]:
    body = _manifest(store.get(f"{folder}/manifest.json").data)
    tensors: dict[str, dict[str, Tensor]] = {}
    for part, wanted in body["parts"].items():
        tensors[part] = {}
        if wanted is not None:
            data = store.get(f"{folder}/{part}.safetensors", limit_bytes=_LIMIT_BYTES).data
            if _digest(data) != wanted:
                raise IntegrityError(
                    f"{part} has digest {_digest(data)}, saved was {wanted} ({len(data)} bytes)"
                )
            tensors[part] = unpack(data, finite=False, limit_bytes=_LIMIT_BYTES)
    return body["step"], tensors, body["meta"]


def _manifest(data: bytes) -> dict[str, Any]:
    """The body of a manifest, checked against its own digest, so the meta data is covered too."""
    try:
        outer = json.loads(data)
        body, wanted = outer["body"], outer["digest"]
        found = _digest(body.encode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"broken manifest ({len(data)} bytes)") from error
    if found != wanted:
        raise IntegrityError(f"manifest has digest {found}, saved was {str(wanted)[:40]}")
    loaded: dict[str, Any] = json.loads(body)
    if loaded["format"] != _FORMAT:
        raise IntegrityError(f"checkpoint format {loaded['format']}, this version reads {_FORMAT}")
    return loaded


def _prune(store: ObjectStore, saved: str, keep: int) -> None:
    """Delete the old, and up to `saved` also whatever lacks a manifest or shares a step."""
    keys = set(store.list_keys())
    steps = {name: step for name, step in _folders(store).items() if step <= _step(saved)}
    kept = {saved}
    for name in sorted(steps, reverse=True):
        fresh = steps[name] not in {steps[other] for other in kept}
        if fresh and len(kept) < keep and f"{name}/manifest.json" in keys:
            kept.add(name)
    for name in steps.keys() - kept:
        _delete(store, name)


def _step(folder: str) -> int:
    match = _FOLDER.fullmatch(folder)
    assert match
    return int(match[1])


def _delete(store: ObjectStore, folder: str) -> None:
    store.delete(f"{folder}/manifest.json")  # first: without it the rest is rubbish, never half a checkpoint
    for key in store.list_keys(folder):
        store.delete(key)


def _clear_after_failure(store: ObjectStore, folder: str) -> None:
    try:
        _delete(store, folder)
    except SpotlightError:
        return  # the failure being reported matters more; the next save clears the folder


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
