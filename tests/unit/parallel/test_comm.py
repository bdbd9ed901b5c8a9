import os
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from sp_group import run_group, store

from spotlight.errors import CommError
from spotlight.parallel import comm

SIZE = 3


def test_all_to_all_with_uneven_and_empty_pieces():
    rows = [[0, 2, 1], [3, 0, 0], [1, 1, 4]]  # rows[i][j]: from i to j

    def rank(group):
        x = torch.cat([torch.full((n, 2), 10.0 * group.rank + j) for j, n in enumerate(rows[group.rank])])
        return group.all_to_all(x, [rows[i][group.rank] for i in range(SIZE)], rows[group.rank])

    for j, got in enumerate(run_group(SIZE, rank)):
        want = torch.cat([torch.full((rows[i][j], 2), 10.0 * i + j) for i in range(SIZE)])
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_all_gather_of_uneven_shares(dtype):
    rows = [2, 0, 3]
    for got in run_group(SIZE, lambda g: g.all_gather(torch.full((rows[g.rank], 2), g.rank).to(dtype), rows)):
        assert torch.equal(got, torch.tensor([[0, 0]] * 2 + [[2, 2]] * 3).to(dtype))


def test_broadcast_and_all_reduce():
    def rank(group):
        x, y = torch.full((4,), float(group.rank)), torch.full((4,), float(group.rank + 1))
        group.broadcast(x, 2)
        group.all_reduce(y)
        group.synchronize()
        return x, y

    for x, y in run_group(SIZE, rank):
        assert x.eq(2).all()
        assert y.eq(6).all()


def test_copy_weights_takes_parameters_and_buffers_of_the_root():
    def rank(group):
        torch.manual_seed(group.rank)
        module = torch.nn.BatchNorm1d(4)
        torch.nn.init.normal_(module.weight)
        module.running_mean.fill_(group.rank)
        comm.copy_weights(module, group, root=1)
        return module.state_dict()

    states = run_group(2, rank)
    assert states[0]["running_mean"].eq(1).all()
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def here():
    return ("127.0.0.1", store().port)


def test_a_missing_member_is_an_error_after_the_timeout():
    with pytest.raises(CommError, match="did not form"):
        comm.form(here(), "test/alone", 0, 2, form_timeout_s=0.3)


def test_forming_can_be_cancelled_from_another_thread():
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(CommError, match="cancelled"):
        comm.form(here(), "test/cancelled", 0, 2, form_timeout_s=3, cancelled=cancelled)
    for thread in threading.enumerate():  # what was left behind ends by itself
        if thread.name == "form":
            thread.join(20)
            assert not thread.is_alive()


def test_a_store_that_is_not_there_is_an_error():
    with pytest.raises(CommError, match="did not form"):
        comm.form(("127.0.0.1", 1), "test/nowhere", 0, 2, form_timeout_s=0.5)


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(ValueError, match="rank 2"):
        comm.form(here(), "test/outside", 2, 2)


def test_abort_frees_a_rank_that_waits_for_a_silent_peer():
    """The peer never enters the collective and never closes anything: what a frozen machine looks like."""
    waiting, freed = threading.Event(), threading.Event()

    def rank(group):
        if group.rank == 1:
            assert freed.wait(20)
            return "silent"
        threading.Timer(0.2, lambda: (waiting.set(), group.abort())).start()
        with pytest.raises(CommError, match="aborted"):
            group.all_reduce(torch.ones(4))
        with pytest.raises(CommError, match="aborted"):
            group.all_reduce(torch.ones(4))
        freed.set()
        return "freed"

    assert run_group(2, rank, op_timeout_s=60) == ["freed", "silent"]
    assert waiting.is_set()


def test_an_operation_that_takes_too_long_is_an_error():
    def rank(group):
        if group.rank == 0:
            with pytest.raises(CommError, match="collective failed"):
                group.all_reduce(torch.ones(1))

    run_group(2, rank, op_timeout_s=0.3)


def test_close_gives_the_sockets_back():
    def sockets():
        return len(comm._open_sockets())

    run_group(2, lambda group: group.all_reduce(torch.ones(1)))
    before = sockets()
    for _ in range(5):
        run_group(4, lambda group: group.all_reduce(torch.ones(1)))
    assert sockets() <= before + 4, os.listdir("/proc/self/fd")
