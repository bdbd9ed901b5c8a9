"""One zygote for a whole module of gang tests, and inputs with their single-process answer."""

import contextlib
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gang_models

from spotlight.core.regroup import Limits
from spotlight.core.types import Gpu
from spotlight.runtime.gang import Gang
from spotlight.runtime.roster import Timing
from spotlight.runtime.zygote import Zygote

torch.set_num_threads(1)
HERE = Path(__file__).parent
DELAY_S = 0.4
ROWS = 32
GPUS = [Gpu("a", i) for i in range(4)]
# Generous where load on the machine could be mistaken for death; tests of silence set their own.
TIMING = Timing(heartbeat_s=0.2, dead_after_s=10, form_timeout_s=5, op_timeout_s=20)


def zygote(factory="gang_models:tiny", **spec):
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{HERE}:{before or ''}"
    try:
        return Zygote(factory, {"delay_s": DELAY_S, **spec})
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def inputs(adapter, t=0.5, prompts=("12", "345")):
    x = torch.randn(len(prompts), 1, 16, 32, generator=torch.Generator().manual_seed(5))
    return x, torch.full((len(prompts),), t), adapter.encode(prompts).tensors


@contextlib.contextmanager
def gang(spawner, gpus=GPUS, limits=None, timing=TIMING, **options):
    spawners = spawner if isinstance(spawner, dict) else {"a": spawner}
    with Gang("test", spawners, limits or Limits(heads=4), ROWS, timing=timing, **options) as made:
        made.add(gpus)
        made.wait_ready()
        yield made


def alive(pid):
    """Whether a process runs, a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


__all__ = [
    "DELAY_S",
    "GPUS",
    "ROWS",
    "TIMING",
    "Limits",
    "Timing",
    "alive",
    "gang",
    "gang_models",
    "inputs",
    "zygote",
]
