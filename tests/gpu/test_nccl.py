"""NCCL communicators on real devices. Run with `pytest -m gpu`; the tests with a peer need two GPUs.

What they measure is printed with the card's name (`-s`): forming, abort, memory of a communicator.
"""

import copy
import multiprocessing as mp
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "parallel"))
import sp_models as models

from spotlight.errors import CommError
from spotlight.parallel import comm
from spotlight.parallel.ulysses import install

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def form(port, name, rank, size, **options):
    options = {"form_timeout_s": 60, "op_timeout_s": 20, **options}
    return comm.form(("127.0.0.1", port), name, rank, size, device=f"cuda:{rank}", **options)


def report(**figures):
    name = torch.cuda.get_device_name()
    print(f"{name}: " + ", ".join(f"{k} {v:.2f}" for k, v in figures.items()))


def test_a_group_of_one_forms_works_aborts_and_gives_its_memory_back(store):
    torch.ones(1, device="cuda:0")
    free_before = torch.cuda.mem_get_info(0)[0]
    start = time.monotonic()
    group = form(store.port, "one", 0, 1)
    formed = time.monotonic()
    x = torch.arange(6.0, device="cuda:0").view(3, 2)
    assert torch.equal(group.all_to_all(x, [3], [3]), x)
    assert torch.equal(group.all_gather(x, [3]), x)
    group.all_reduce(x)
    group.synchronize()
    assert torch.equal(x.cpu(), torch.arange(6.0).view(3, 2))
    held = free_before - torch.cuda.mem_get_info(0)[0]
    aborting = time.monotonic()
    group.abort()
    aborted = time.monotonic()
    with pytest.raises(CommError, match="aborted"):
        group.all_reduce(x)
    group.close()
    report(form_ms=1e3 * (formed - start), abort_ms=1e3 * (aborted - aborting), memory_mib=held / 2**20)


def run_ranks(target, store, *args):
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=target, args=(store.port, rank, results, *args)) for rank in range(2)]
    for process in ranks:
        process.start()
    return ranks, results


def _sharded(port, rank, results, dtype):
    model = models.sd3(heads=6, dual=(0,), qk_norm="rms_norm").to(f"cuda:{rank}", dtype)
    inputs = {
        k: v.to(f"cuda:{rank}") if isinstance(v, torch.Tensor) else v
        for k, v in models.cast(models.sd3_inputs(h=18, w=14, text=77), dtype).items()
    }
    with torch.no_grad():
        alone = copy.deepcopy(model)(**inputs)[0]
    group = form(port, f"sharded-{dtype}", rank, 2)
    install(model).bind(group)
    with torch.no_grad():
        together = model(**inputs)[0]
    group.synchronize()
    results.put(((together - alone).abs().max() / alone.abs().max()).item())


@two_gpus
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_sharded_forward_is_close_to_one_device(store, dtype, tolerance):
    """Close, not equal: a GEMM over fewer rows may be another kernel."""
    ranks, results = run_ranks(_sharded, store, dtype)
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    drift = max(results.get() for _ in ranks)
    report(drift=drift)
    assert drift < tolerance


def _bereaved(port, rank, results, how):
    group = form(port, f"bereaved-{how}", rank, 2)
    results.put(("pid", rank, os.getpid()))
    x = torch.ones(1 << 20, device=f"cuda:{rank}")
    if rank == 1:
        time.sleep(600)
    start = time.monotonic()
    group.all_reduce(x)
    try:
        group.synchronize()
        results.put(("outcome", rank, "no error"))
    except CommError:
        left = time.monotonic()
        group.close()
        results.put(("outcome", rank, [left - start, time.monotonic() - left]))


@two_gpus
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_gets_away_from_a_dead_or_frozen_peer_and_lives_on(store, how):
    ranks, results = run_ranks(_bereaved, store, int(how))
    pids = dict(results.get()[1:] for _ in ranks)
    try:
        os.kill(pids[1], how)
        _, _, outcome = results.get()
        assert outcome != "no error"
        report(waited_s=outcome[0], close_s=outcome[1])
        assert outcome[0] < 25
        ranks[0].join()
        assert ranks[0].exitcode == 0
    finally:
        os.kill(pids[1], signal.SIGKILL)
        ranks[1].join()
