"""Nested state (an optimizer's, a scheduler's) as flat tensors and JSON, exactly and without pickle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spotlight.errors import IntegrityError


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a tree of dicts, lists, tuples, tensors and scalars into (named tensors, JSON-able skeleton).

    `unflatten` gives the same tree: types of keys (int or str), tuples, floats and every bit of the tensors.
    Each tensor's name starts with its number, so no two can clash. ValueError on any other type.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            name = f"{len(tensors)}{path}"[:200]
            tensors[name] = node
            return {"tensor": name}
        if isinstance(node, dict):
            return {"dict": [[_key(key), walk(value, f"{path}.{_word(key)}")] for key, value in node.items()]}
        if type(node) in (list, tuple):
            return {type(node).__name__: [walk(value, f"{path}.{i}") for i, value in enumerate(node)]}
        if node is None or type(node) in (bool, int, float, str):
            return node
        raise ValueError(f"cannot store a {type(node).__name__} at {path or 'the top'}")

    return tensors, walk(tree, "")


def unflatten(tensors: Mapping[str, Tensor], skeleton: Any) -> Any:
    """The tree that `flatten` took apart. IntegrityError if the skeleton or a tensor is not as written."""
    if not isinstance(skeleton, dict):
        return skeleton
    try:
        ((kind, inner),) = skeleton.items()
        if kind == "tensor":
            return tensors[inner]
        if kind == "dict":
            return {key: unflatten(tensors, value) for key, value in inner}
        return {"list": list, "tuple": tuple}[kind](unflatten(tensors, value) for value in inner)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"broken state tree: {error!r:.100}") from error


def _key(key: Any) -> Any:
    if type(key) not in (int, str):
        raise ValueError(f"cannot store a key of type {type(key).__name__}")
    return key


def _word(key: Any) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", str(key))[:60]
