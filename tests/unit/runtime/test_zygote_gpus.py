"""A process that forks ranks must not have opened the GPUs' driver, and its ranks must see what it was told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotlight.runtime.zygote import Zygote, see_gpus


def test_the_zygote_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    zygote = Zygote("builtins:dict", {})
    try:
        zygote.wait_ready()
        environment = Path(f"/proc/{zygote.pid}/environ").read_text().split("\0")
        assert "CUDA_VISIBLE_DEVICES=" in environment
        assert "PYTORCH_NVML_BASED_CUDA_CHECK=1" in environment
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    finally:
        zygote.close()


@pytest.mark.parametrize("visible", ["2,3", "", None])
def test_a_rank_sees_what_the_explorer_saw(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    see_gpus(visible)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
