"""`spotlight train tiny-geneval`: the same path as `tiny`, another model, other prompts, another reward."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from integration.runs import SMALL, leftovers, losses, train
from PIL import Image

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_iterations_and_a_drawing(tmp_path: Path) -> None:
    settings = (*SMALL, "data.validation_size=24", "cluster.start_with=1")
    arguments = ("--iterations", "2", "--spot", "1", "--name", "run")
    summary = train(tmp_path, *arguments, settings=settings, recipe="tiny-geneval")
    assert summary["iterations"] == 2
    assert summary["samples_lost"] == 0
    for score in (summary["score_base"], summary["score_final"]):
        assert 0.1 < score < 0.9
        assert score * 24 == pytest.approx(round(score * 24), abs=0.02)  # GenEval's 0 or 1, averaged
    assert len(losses(tmp_path, "run")) == 2
    assert all(math.isfinite(loss) for loss in losses(tmp_path, "run"))
    folder = tmp_path / "runs" / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward_mean"] for row in rows if row["kind"] == "iteration"]
    assert all(0 < reward < 1 for reward in rewards)
    sheet = np.asarray(Image.open(folder / "samples" / "it00002.png").convert("RGB")).astype(int)
    assert (np.ptp(sheet, axis=2) > 80).mean() > 0.02  # there is colour in it
    picture = tmp_path / "drawn.png"
    done = subprocess.run(
        [sys.executable, "-m", "spotlight_cli.main", "sample", "run", "two red circles", "--out", str(picture)],
        env={**os.environ, "SPOTLIGHT_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Image.open(picture).mode == "RGB"
    assert leftovers(tmp_path) == []
