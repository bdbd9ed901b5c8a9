"""Prompt embeddings: text encoders that are loaded only when one is missing, and a folder that remembers.

The folder may be shared by all nodes of a run. What the trainer has embedded once, no spot node embeds
again, nor does it load (or download) the encoders at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from spotlight.rl.models import Conditioning

Embed = Callable[[str], Mapping[str, Tensor]]  # a prompt's tensors, without a batch dimension
REMEMBERED = 256  # embeddings kept in memory; a T5 one is 2 MB


class PromptEncoder:
    """One prompt after the other, so that an embedding does not depend on which others share the batch.

    `make` loads the encoders and returns the function that embeds; `key` names encoders, precision and
    whatever else changes an embedding; `folder` is where embeddings are kept (None: nowhere).
    """

    def __init__(self, make: Callable[[], Embed], key: Callable[[], str], folder: Path | None) -> None:
        self._make = make
        self._key = key
        self._folder = folder
        self._remember = lru_cache(maxsize=REMEMBERED)(self._one)

    def __call__(self, prompts: Sequence[str]) -> Conditioning:
        """Embeddings on the CPU, shorter ones padded with zeros."""
        return Conditioning.cat(self._remember(prompt) for prompt in prompts)

    @cached_property
    def _embed(self) -> Embed:
        return self._make()

    @cached_property
    def _place(self) -> Path | None:
        return None if self._folder is None else self._folder / _digest(self._key())

    @torch.no_grad()
    def _one(self, prompt: str) -> Conditioning:
        kept = self._place and self._place / f"{_digest(prompt)}.safetensors"
        tensors = _read(kept) if kept else None
        if tensors is None:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in self._embed(prompt).items()}
            if kept:
                _write(kept, tensors)
        return Conditioning({name: tensor[None] for name, tensor in tensors.items()})


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, Tensor] | None:
    """None for a file that is not there or damaged: it is made anew."""
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError):
        return None


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Whole or not at all, whoever else writes it. A full disk costs the cache, not the run."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(save(dict(tensors)))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
