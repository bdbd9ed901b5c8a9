"""Names to code: a registry maps a short name to `module:attribute`, and a user may write the long form.

Nothing is imported before it is asked for, so a missing optional package hurts only who needs it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from spotlight.errors import ConfigError


def resolve(name: str, known: Mapping[str, str], noun: str) -> Any:
    """The object called `name`: a key of `known` or the user's own `module:attribute`.

    Raises ConfigError: an unknown short name (with the near miss), a module that cannot be imported, an
    attribute that is not there.
    """
    spec = known.get(name, name)
    module_name, colon, attribute = spec.partition(":")
    if not colon:
        raise ConfigError(f"unknown {noun} {name[:80]!r}", hint=_hint(name, known))
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:  # the last two: an empty or a relative name
        raise ConfigError(
            f"{noun} {name[:80]!r}: cannot import {module_name!r} ({error})",
            hint="install the package, or put your file's folder on PYTHONPATH",
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(module), 1)
        raise ConfigError(
            f"{noun} {name[:80]!r}: {module_name} has no {attribute!r}",
            hint=f"did you mean {module_name}:{near[0]}?" if near else None,
        ) from None


def _hint(name: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(sorted(known))}; or your own as module:name"
