"""What is found out about a machine."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

import pytest

from spotlight.observe import doctor


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "fail")]
)
def test_python(version: tuple[int, int], verdict: str) -> None:
    assert doctor.check_python(version).verdict == verdict


def test_an_empty_folder_named_sky_is_not_skypilot() -> None:
    namespace = importlib.machinery.ModuleSpec("sky", None, is_package=True)
    assert doctor.check_skypilot(lambda name: namespace).verdict == "warn"
    assert doctor.check_skypilot(lambda name: None).verdict == "warn"
    real = importlib.machinery.ModuleSpec("sky", None, origin="/site/sky/__init__.py")
    assert doctor.check_skypilot(lambda name: real).verdict == "ok"


@pytest.mark.parametrize(
    ("version", "verdict"), [("2.51.9", "fail"), ("2.52.0", "ok"), ("3.0.0rc1", "ok"), ("", "fail")]
)
def test_ray_must_know_tokens(version: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: version)
    assert doctor.check_ray().verdict == verdict


def test_a_missing_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor.check_package("no-such-package-as-this", "training needs it")
    assert (check.verdict, check.found) == ("fail", "not installed; training needs it")
    assert check.fix


def test_thresholds(tmp_path: Path) -> None:
    assert doctor.check_disk(1).verdict == "ok"
    assert doctor.check_disk(2**62).verdict == "warn"
    assert doctor.check_memory(1).verdict == "ok"
    assert doctor.check_memory(2**62).verdict == "warn"
    assert doctor.check_shared_memory(tmp_path, 1).verdict == "ok"
    assert doctor.check_shared_memory(tmp_path, 2**62).verdict == "warn"
    assert doctor.check_shared_memory(tmp_path / "none").verdict == "warn"


def test_threads() -> None:
    assert doctor.check_threads({"OMP_NUM_THREADS": "8"}).verdict == "warn"
    assert doctor.check_threads({"OMP_NUM_THREADS": "1"}).verdict == "ok"
    assert doctor.check_threads({}).verdict == "ok"


def test_whatever_is_not_ok_says_what_to_do() -> None:
    for check in doctor.examine({"OMP_NUM_THREADS": "4"}):
        assert check.verdict == "ok" or check.fix
