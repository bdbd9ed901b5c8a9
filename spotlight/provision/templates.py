"""The tasks and scripts of `sky/`, found in a checkout or in an installed wheel, and filled in without any shell.

SkyPilot replaces `${NAME}` in file mounts as raw text, so a value could add a mount. Hence: values go into `envs` and
`secrets` alone, keys are those that the template declares, and a mount is a plain path without `$`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from spotlight import __version__
from spotlight.errors import NotFoundError, PreconditionError, UserError
from spotlight.names import run_name

SCRIPTS = "~/.spotlight/node"
DIST = "~/.spotlight/dist"
LAUNCH = "~/.spotlight/launch"
_NODE = re.compile(r"(?:od|s)[0-9]{1,4}", re.ASCII)
_PATH = re.compile(r"[A-Za-z0-9/_.~+-]{1,400}", re.ASCII)
_VALUE = re.compile(r"[ -~]{0,4000}", re.ASCII)  # printable ASCII: no newline, no control character

Template = Literal["ondemand", "spot"]


def folder() -> Path:
    """Where the node-side files are."""
    package = Path(__file__).parents[1]
    for candidate in (package / "_sky", package.parent / "sky"):
        if (candidate / "spot.yaml").is_file():
            return candidate
    raise NotFoundError(
        "the node-side files are missing from this installation", hint="reinstall spotlight-rl"
    )


def cluster_name(run: str, node: str) -> str:
    """SkyPilot's name of a node's cluster: `spotlight-<run>-od` or `spotlight-<run>-s3`. Raises UserError."""
    if not _NODE.fullmatch(node):
        raise UserError(f"bad node name {node[:40]!r}")
    return f"spotlight-{run_name(run)}-{'od' if node.startswith('od') else node}"


def task(
    template: Template, *, envs: Mapping[str, str], secrets: Mapping[str, str], mounts: Mapping[str, Path]
) -> dict[str, Any]:
    """A SkyPilot task as a plain tree. Raises UserError for a value, a key or a path that may not be there."""
    tree: dict[str, Any] = yaml.safe_load((folder() / f"{template}.yaml").read_text(encoding="utf-8"))
    tree["envs"] = _filled(tree["envs"], envs)
    tree["secrets"] = _filled(tree["secrets"], secrets)
    tree["file_mounts"] = {_path(there): _path(str(here)) for there, here in mounts.items()}
    return tree


def versions() -> dict[str, str]:
    """What a node must have the same of; an unknown one (no Ray on a laptop) is not checked."""
    try:
        ray = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        ray = ""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"SPOTLIGHT_VERSION": __version__, "SPOTLIGHT_PYTHON": python, "SPOTLIGHT_RAY": ray}


def stage_dist(target: Path) -> None:
    """Put what a node installs into `target`: a wheel, if we run from a checkout, and the versions of all packages.

    SPOTLIGHT_WHEEL names a wheel to send instead of one built here. Raises PreconditionError.
    """
    target.mkdir(parents=True, exist_ok=True)
    (target / "constraints.txt").write_text("\n".join(_constraints()) + "\n")
    sent = os.environ.get("SPOTLIGHT_WHEEL")
    source = _checkout()
    if sent:
        wheel = Path(sent)
        if not wheel.is_file() or wheel.suffix != ".whl":
            raise PreconditionError(f"SPOTLIGHT_WHEEL: no wheel at {sent[:200]!r}")
        (target / wheel.name).write_bytes(wheel.read_bytes())
    elif source is not None:
        _build_wheel(source, target)


def _filled(declared: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, str]:
    if declared.keys() != values.keys():
        odd = sorted(declared.keys() ^ values.keys())
        raise ValueError(f"the template and the values do not agree: {odd}")
    for name, value in values.items():
        if not _VALUE.fullmatch(value):
            raise UserError(f"{name}: not printable ASCII of at most 4000 characters: {value[:40]!r}")
    return dict(values)


def _path(path: str) -> str:
    if not _PATH.fullmatch(path) or ".." in path.split("/"):
        raise UserError(f"cannot send {path[:80]!r} to a node", hint="a path of A-Z, a-z, 0-9 and '/_.~+-'")
    return path


def _constraints() -> list[str]:
    """Every installed package pinned; a local label of torch ("+cpu") is this machine's business."""
    pins = {
        distribution.metadata["Name"].lower(): distribution.version.partition("+")[0]
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }
    pins.pop("spotlight-rl", None)
    return [f"{name}=={version}" for name, version in sorted(pins.items())]


def _checkout() -> Path | None:
    """The checkout that an editable installation points to."""
    text = importlib.metadata.distribution("spotlight-rl").read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(str(origin["url"]).removeprefix("file://"))


def _build_wheel(source: Path, target: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(target),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PreconditionError(
            f"no wheel could be built of {source}: {done.stderr.strip()[-300:]}",
            hint="build one (pip wheel --no-deps .) and name it in SPOTLIGHT_WHEEL",
        )
