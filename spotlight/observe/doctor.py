"""Is this machine fit? One line a check: ok, warn or fail, what was found, what to do about it.

Nothing heavy is imported: versions come from package metadata, so the answer takes a moment and not a minute.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from spotlight.names import home

Verdict = Literal["ok", "warn", "fail"]
_GIB = 1024**3
# Token authentication came with 2.52; without it a cluster is open to whoever reaches it.
_OLDEST_RAY = (2, 52)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `fix` is what to do when it is not ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def examine(environ: Mapping[str, str] | None = None) -> list[Check]:
    """Run every check. A check that cannot be made is a finding, never an exception."""
    environ = os.environ if environ is None else environ
    checks: list[Callable[[], Check]] = [
        check_python,
        lambda: check_package("torch", "training needs it"),
        lambda: check_package("diffusers", "training needs it"),
        lambda: check_package("onnxruntime", "the OCR reward needs it"),
        check_ray,
        check_skypilot,
        check_home,
        check_disk,
        check_memory,
        check_shared_memory,
        lambda: check_accelerator(environ),
        lambda: check_threads(environ),
    ]
    return [check() for check in checks]


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """Python is one that Ray and SkyPilot both support."""
    found = f"{version[0]}.{version[1]} ({sys.executable})"
    if (3, 11) <= version < (3, 13):
        return Check("python", "ok", found)
    return Check("python", "fail", found, "use Python 3.11 or 3.12")


def check_package(name: str, why: str, fix: str = "pip install spotlight-rl") -> Check:
    """A package is installed."""
    version = _version(name)
    if version is None:
        return Check(name, "fail", f"not installed; {why}", fix)
    return Check(name, "ok", version)


def check_ray() -> Check:
    """Ray is there and new enough to demand a token."""
    version = _version("ray")
    if version is None:
        return Check("ray", "fail", "not installed; every run needs it", "pip install spotlight-rl")
    if _numbers(version) < _OLDEST_RAY:
        return Check("ray", "fail", f"{version}: no token authentication", "pip install 'ray[default]>=2.52'")
    return Check("ray", "ok", version)


def check_skypilot(find: Callable[[str], object | None] = importlib.util.find_spec) -> Check:
    """`sky` is SkyPilot, not a folder of that name: an empty namespace imports without complaint."""
    spec = find("sky")
    origin = getattr(spec, "origin", None)
    if origin is None:
        return Check(
            "skypilot", "warn", "not installed; local runs work, clouds do not", "pip install spotlight-rl"
        )
    return Check("skypilot", "ok", f"{_version('skypilot') or 'unknown version'} ({origin})")


def check_home() -> Check:
    """The folder of the runs can be written."""
    folder = home()
    nearest = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return Check("runs folder", "ok", str(folder))
    except OSError as error:
        why = f"{folder}: {error.strerror or error}"
        return Check("runs folder", "fail", why, "set SPOTLIGHT_HOME to a folder you can write")


def check_disk(needed_bytes: int = 5 * _GIB) -> Check:
    """Room for checkpoints."""
    nearest = next((parent for parent in (home(), *home().parents) if parent.exists()), Path("/"))
    free = shutil.disk_usage(nearest).free
    found = f"{free / _GIB:.1f} GiB free at {nearest}"
    if free >= needed_bytes:
        return Check("disk", "ok", found)
    return Check("disk", "warn", found, "free some space or set SPOTLIGHT_HOME to a larger disk")


def check_memory(needed_bytes: int = 6 * _GIB) -> Check:
    """Memory for the tiny recipe on a local cluster."""
    free = psutil.virtual_memory().available
    found = f"{free / _GIB:.1f} GiB available, {os.cpu_count()} CPUs"
    if free >= needed_bytes:
        return Check("memory", "ok", found)
    return Check("memory", "warn", found, "a local run with two spot nodes wants 6 GiB; try --spot 1")


def check_shared_memory(folder: Path = Path("/dev/shm"), needed_bytes: int = 2 * _GIB) -> Check:
    """/dev/shm holds Ray's objects and the weights that a node's processes share."""
    if not folder.is_dir():
        return Check("shared memory", "warn", f"no {folder}", "weights are kept on disk: slower to attach")
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:.1f} GiB free in {folder}"
    if free >= needed_bytes:
        return Check("shared memory", "ok", found)
    return Check("shared memory", "warn", found, "in a container: --shm-size=4g")


def check_accelerator(environ: Mapping[str, str]) -> Check:
    """GPUs as the driver shows them."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        return Check("gpu", "ok", "none; the tiny recipes run on the CPU")
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.strip():
        return Check("gpu", "warn", f"{len(devices)}, all hidden", "unset CUDA_VISIBLE_DEVICES")
    return Check("gpu", "ok", f"{len(devices)}")


def check_threads(environ: Mapping[str, str]) -> Check:
    """Contending threads cost a small machine dearly; each of our processes runs one."""
    value = environ.get("OMP_NUM_THREADS", "")
    if value.isdigit() and int(value) > 1:
        return Check("threads", "warn", f"OMP_NUM_THREADS={value}", "unset it: processes would contend")
    return Check("threads", "ok", "one per process")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)
