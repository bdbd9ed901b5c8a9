"""The Hugging Face hub and folders like it: pretrained parts in, every tensor accounted for; results out.

Nothing here runs a repository's own code, and nothing unpickles: a part that has no safetensors is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError

from spotlight.errors import (
    ConfigError,
    CredentialError,
    IntegrityError,
    NotFoundError,
    PreconditionError,
    UserError,
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # configurations and tokenizers
_VARIANTS = ("*.fp16*", "*.bf16*", "*.fp8*", "*.ema*", "*.non_ema*")  # the same weights once more
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 20
_on_cpu: ContextVar[bool] = ContextVar("on_cpu", default=False)


def device() -> torch.device:
    """Where models work: this process's accelerator if there is one."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def transformer_device() -> torch.device:
    """Where a transformer is loaded to: `device()`, but within `on_cpu` the CPU."""
    return torch.device("cpu") if _on_cpu.get() else device()


@contextmanager
def on_cpu(wanted: bool = True) -> Iterator[None]:
    """Transformers that are loaded now stay on the CPU: whole, they might not fit where a part of them will work."""
    before = _on_cpu.set(wanted)
    try:
        yield
    finally:
        _on_cpu.reset(before)


def locate(path: str, revision: str | None, parts: Sequence[str]) -> Path:
    """The folder of a pretrained model: `path` itself, or what the hub has under that name, downloaded.

    Of a hub repository only the subfolders `parts` ("" is the top) are fetched, weights as safetensors.
    Raises NotFoundError, CredentialError (a gated or private one), ConfigError (a revision of a folder).
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if revision:
            raise ConfigError(f"{path} is a folder, which has no revision {revision[:80]!r}")
        return folder
    if not _HUB_ID.fullmatch(path):
        raise NotFoundError(f"no folder {path[:200]!r}, nor is it a hub id like owner/name")
    wanted = [
        f"{part}/{name}" if part else name for part in parts for name in (*_SIDE_FILES, "*.safetensors")
    ]
    try:
        found = snapshot_download(
            path,
            revision=revision,
            allow_patterns=["model_index.json", *wanted],
            ignore_patterns=[*_VARIANTS],
        )
    except GatedRepoError as error:
        raise CredentialError(
            f"{path} is gated: {str(error)[:200]}",
            hint=f"accept its licence at https://huggingface.co/{path}, then set HF_TOKEN",
        ) from None
    except LocalEntryNotFoundError as error:
        raise NotFoundError(
            f"{path} is not in the local cache and the hub cannot be reached",
            hint="unset HF_HUB_OFFLINE, or give a local folder",
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise NotFoundError(f"{path}@{revision or 'main'}: {str(error)[:200]}") from error
    return Path(found)


def load(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    """One model of a diffusers or transformers class, on the CPU, frozen, in inference mode.

    Raises NotFoundError without safetensors; IntegrityError when a file is damaged or does not fill the
    model, where both libraries would warn and go on with random numbers.
    """
    weight_files(folder)
    precision = {"torch_dtype" if kind.__module__.startswith("diffusers.") else "dtype": dtype}
    try:
        model, report = kind.from_pretrained(
            str(folder), use_safetensors=True, local_files_only=True, output_loading_info=True, **precision
        )
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
        raise IntegrityError(f"{folder}: not a {kind.__name__} ({str(error)[:300]})") from error
    gaps = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if gaps:
        raise IntegrityError(
            f"{folder}: {len(gaps)} tensors of {kind.__name__} missing, first {gaps[0][:100]}"
        )
    return model.requires_grad_(False).eval()


def check_push(repository: str, token: str | None) -> str:
    """The token to push with. Raises UserError for what is no hub id, CredentialError without a token."""
    if not _HUB_ID.fullmatch(repository):
        raise UserError(f"{repository[:200]!r} is no hub id", hint="owner/name")
    if not token:
        raise CredentialError(
            f"pushing to {repository} needs a token that may write",
            hint="set HF_TOKEN; https://huggingface.co/settings/tokens makes one",
        )
    return token


def push(folder: Path, repository: str, token: str, message: str) -> str:
    """Upload a folder to the hub, into a new private repository or the one that is there; the commit's address.

    Raises UserError or CredentialError (see `check_push`; also when the hub refuses the token), PreconditionError when
    it cannot be reached or will not take it.
    """
    check_push(repository, token)
    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        why = str(error)[:200]
        if error.response is not None and error.response.status_code in (401, 403):
            raise CredentialError(f"the hub refuses the token for {repository}: {why}") from None
        raise PreconditionError(f"the hub did not take {repository}: {why}") from error
    except (OSError, httpx.HTTPError) as error:
        raise PreconditionError(f"the hub cannot be reached: {str(error)[:200]}") from error
    return commit.commit_url


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of one model, by name. Raises NotFoundError."""
    found = sorted(path for path in folder.glob("*.safetensors") if not any(map(path.match, _VARIANTS)))
    if not found or not (folder / "config.json").is_file():
        raise NotFoundError(
            f"{folder} holds no config.json with safetensors",
            hint="pickled weights are not read; convert them with save_pretrained(safe_serialization=True)"
            if any(folder.glob("*.bin"))
            else "see model.path",
        )
    return found


def identity(folder: Path, parts: Iterable[str]) -> str:
    """`blake2b:<hex>` of the models in `parts`, without reading all of them.

    Digests every file's name within its part, its size and 16 evenly spaced MiB of it, which cover the
    header with all names and shapes. Any other training of the same architecture differs there; an edit of a
    few tensors of a large file may not.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        for path in [folder / part / "config.json", *weight_files(folder / part)]:
            size = path.stat().st_size
            digest.update(f"{part}/{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for place in _places(size):
                    file.seek(place)
                    digest.update(file.read(_SAMPLE_BYTES))
    return f"blake2b:{digest.hexdigest()}"


def _places(size: int) -> list[int]:
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return list(range(0, size, _SAMPLE_BYTES))
    return [i * (size - _SAMPLE_BYTES) // (_SAMPLES - 1) for i in range(_SAMPLES)]


def load_tokenizer(kind: Any, folder: Path) -> Any:
    """A tokenizer or processor of a transformers class. Raises IntegrityError."""
    try:
        return kind.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"{folder}: not a {kind.__name__} ({str(error)[:300]})") from error
