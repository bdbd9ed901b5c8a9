"""Names to code: a registry maps a short name to `module:attribute`, and a user may write the long form.

Nothing is imported before it is asked for, so a missing optional package hurts only who needs it, and a name
can be checked where torch is not wanted.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from spotlight.errors import ConfigError

MODELS: dict[str, str] = {
    "flux": "spotlight.rl.models.flux:load",
    "qwen_image": "spotlight.rl.models.qwen_image:load",
    "sd3": "spotlight.rl.models.sd3:load",
    "tiny": "spotlight.rl.models.tiny:load",
}
REWARDS: dict[str, str] = {
    "clip": "spotlight.rl.rewards.clip:ClipScore",
    "geneval": "spotlight.rl.rewards.detector:reward",
    "geneval_graded": "spotlight.rl.rewards.detector:graded_reward",
    "geneval_shapes": "spotlight.rl.rewards.shapes:reward",
    "geneval_shapes_graded": "spotlight.rl.rewards.shapes:graded_reward",
    "jpeg_compressibility": "spotlight.rl.rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "spotlight.rl.rewards.jpeg:JpegIncompressibility",
    "ocr": "spotlight.rl.rewards.ocr:EditReward",
    "ocr_soft": "spotlight.rl.rewards.ocr:SoftReward",
    "pickscore": "spotlight.rl.rewards.pickscore:PickScore",
    "vlm_ocr": "spotlight.rl.rewards.vlm_ocr:VlmOcr",
}
# Rewards that are a model from the hub or a folder: `name@source` says which.
WITH_WEIGHTS = ("clip", "geneval", "geneval_graded", "pickscore", "vlm_ocr")


def resolve(name: str, known: Mapping[str, str], noun: str) -> Any:
    """The object called `name`: a key of `known` or the user's own `module:attribute`.

    Raises ConfigError: an unknown short name (with the near miss), a module that cannot be imported, an
    attribute that is not there.
    """
    module_name, attribute = _parts(name, known, noun)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:  # the last two: an empty or a relative name
        raise _not_importable(noun, name, f"{module_name!r} ({error})") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(module), 1)
        raise ConfigError(
            f"{noun} {name[:80]!r}: {module_name} has no {attribute!r}",
            hint=f"did you mean {module_name}:{near[0]}?" if near else None,
        ) from None


def check_reward(name: str, *, here: bool = True) -> None:
    """Raise ConfigError for what cannot be the name of a reward; nothing is loaded. `here`: on this machine."""
    short, at, _ = name.partition("@")
    if not name.startswith(("http://", "https://")):
        _check(short if at and short in WITH_WEIGHTS else name, REWARDS, "reward", here)


def check_model(kind: str, *, here: bool = True) -> None:
    """The same for the kind of a model."""
    _check(kind, MODELS, "model", here)


def _check(name: str, known: Mapping[str, str], noun: str, here: bool) -> None:
    module_name, _ = _parts(name, known, noun)
    if name in known or not here:
        return
    try:
        found = module_name in sys.modules or find_spec(module_name)
    except (ImportError, ValueError, TypeError) as error:
        raise _not_importable(noun, name, f"{module_name!r} ({error})") from error
    if not found:
        raise _not_importable(noun, name, repr(module_name))


def _parts(name: str, known: Mapping[str, str], noun: str) -> tuple[str, str]:
    module_name, colon, attribute = known.get(name, name).partition(":")
    if not colon:
        raise ConfigError(f"unknown {noun} {name[:80]!r}", hint=_hint(name, known))
    return module_name, attribute


def _not_importable(noun: str, name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{noun} {name[:80]!r}: cannot import {what}",
        hint="install the package, or put your file's folder on PYTHONPATH",
    )


def _hint(name: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(sorted(known))}; or your own as module:name"
