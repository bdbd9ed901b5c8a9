"""Ours against diffusers' own context parallelism, where it works on CPU: even lengths, no SD3."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["qwen", "qwen-mask", "flux"])
def test_close_to_diffusers_context_parallelism(case, size):
    script = Path(__file__).with_name("sp_oracle.py")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, case, str(size)], capture_output=True, text=True, env=env, timeout=170
    )
    assert done.returncode == 0, done.stderr[-2000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert differences["ours"] == 0.0
    assert differences["theirs"] < 1e-5  # so the two agree to 1e-5 too
