"""Real rank processes, really killed and frozen. Every result is compared bit for bit with one process's."""

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from gang_setup import GPUS, TIMING, Limits, Timing, alive, gang, gang_models, inputs, zygote

from spotlight.core.types import Gpu
from spotlight.errors import CommError, ConfigError, IntegrityError, RunError
from spotlight.runtime.gang import Gang, GangAdapter
from spotlight.runtime.link import Link, encode
from spotlight.store import weights

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]
MID_STEP = 0.95  # a time at which the model dawdles


@pytest.fixture(scope="module")
def nursery():
    made = zygote()
    made.wait_ready()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model():
    return gang_models.tiny({})


@pytest.fixture(scope="module")
def expected(model):
    x, t, cond = inputs(model)
    with torch.no_grad():
        return model._forward(x, t, cond)


def one_process(model, t=0.5, **kw):
    x, times, cond = inputs(model, t)
    with torch.no_grad():
        return gang_models.TinyAdapter.velocity(model, x, times, cond, **kw)


def soon(action, after_s=0.15):
    timer = threading.Timer(after_s, action)
    timer.start()
    return timer


def kill(made, *gpus, how=signal.SIGKILL):
    pids = [made.pids[gpu] for gpu in gpus]

    def blow():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # the gang was faster
                os.kill(pid, how)

    return blow


def assert_gone(pids):
    deadline = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if alive(pid)]
        time.sleep(0.01)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_a_forward_is_the_same_at_every_degree(nursery, model, degree):
    with gang(nursery, degree=degree) as made:
        assert torch.equal(made.velocity(*inputs(model)), one_process(model))
        assert made.group.degree == degree
        assert made.live == tuple(GPUS)
        assert made.recoveries == []


def test_guidance_and_the_adapter(nursery, model):
    x, t, _ = inputs(model)
    cond, negative = model.encode(["12", "345"]), model.encode(["", ""])
    with gang(nursery) as made:
        adapter = GangAdapter(model, made)
        assert adapter.latent_shape(16, 32) == (1, 16, 32)
        v = adapter.velocity(x, t, cond, negative=negative, cfg=3.0)
    with torch.no_grad():
        assert torch.equal(v, model.velocity(x, t, cond, negative=negative, cfg=3.0))


def test_a_rank_killed_in_the_middle_of_a_step(nursery, model):
    with gang(nursery) as made:
        made.velocity(*inputs(model))
        victim = made.pids[GPUS[3]]
        soon(kill(made, GPUS[3]))
        assert torch.equal(made.velocity(*inputs(model, MID_STEP)), one_process(model, MID_STEP))
        assert made.group.members == tuple(GPUS[:3])
        (recovery,) = made.recoveries
        assert (recovery.degree_before, recovery.degree_after) == (4, 3)
        order = [
            recovery.noticed_at,
            recovery.stopped_at,
            recovery.decided_at,
            recovery.formed_at,
            recovery.done_at,
        ]
        assert order == sorted(order)
        assert not alive(victim)


def test_the_leader_is_replaceable_too(nursery, model):
    with gang(nursery) as made:
        made.velocity(*inputs(model))
        soon(kill(made, GPUS[0]))
        assert torch.equal(made.velocity(*inputs(model, MID_STEP)), one_process(model, MID_STEP))
        assert made.group.members == tuple(GPUS[1:])


def test_two_failures_at_once(nursery, model):
    with gang(nursery) as made:
        made.velocity(*inputs(model))
        soon(kill(made, GPUS[0], GPUS[2]))
        assert torch.equal(made.velocity(*inputs(model, MID_STEP)), one_process(model, MID_STEP))
        assert made.group.members == (GPUS[1], GPUS[3])


def test_all_but_one_lost_and_then_all(nursery, model):
    with gang(nursery) as made:
        made.velocity(*inputs(model))
        soon(kill(made, *GPUS[1:]))
        assert torch.equal(made.velocity(*inputs(model, MID_STEP)), one_process(model, MID_STEP))
        assert made.group.members == (GPUS[0],)
        soon(kill(made, GPUS[0]))
        with pytest.raises(CommError, match="all ranks of gang test are lost"):
            made.velocity(*inputs(model, MID_STEP))
        made.add([GPUS[2]])  # and it can begin again
        assert torch.equal(made.velocity(*inputs(model)), one_process(model))


def test_a_frozen_rank_is_noticed_by_its_silence_and_killed(nursery, model):
    with gang(nursery, timing=Timing(heartbeat_s=0.2, dead_after_s=2)) as made:
        made.velocity(*inputs(model))
        victim = made.pids[GPUS[1]]
        soon(kill(made, GPUS[1], how=signal.SIGSTOP))
        assert torch.equal(made.velocity(*inputs(model, MID_STEP)), one_process(model, MID_STEP))
        assert GPUS[1] not in made.group.members
        assert "silent" in made.recoveries[0].reason
        assert_gone([victim])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_failure_while_forming(nursery, model, how):
    """The victim never answers to `form`, the others wait for it in the store."""
    with gang(nursery, timing=Timing(heartbeat_s=0.2, dead_after_s=2, form_timeout_s=60)) as made:
        kill(made, GPUS[2], how=how)()
        assert torch.equal(made.velocity(*inputs(model)), one_process(model))
        assert made.group.members == (GPUS[0], GPUS[1], GPUS[3])


def test_forming_that_takes_too_long_is_given_up_and_tried_again(nursery, model):
    """A rank whose control thread lives but whose compute thread is busy elsewhere cannot join in time."""
    with gang(nursery, timing=Timing(heartbeat_s=0.2, dead_after_s=10, form_timeout_s=0.1)) as made:
        x, t, cond = inputs(model, MID_STEP)
        busy = next(m for m in made._roster.members if m.gpu == GPUS[1])
        head = {"op": "velocity", "epoch": 0, "seq": -1, "cfg": 1.0}
        made._roster.send(
            busy, encode(head, {"latents": x, "t": t, **{f"cond.{k}": v for k, v in cond.items()}})
        )
        assert torch.equal(made.velocity(*inputs(model)), one_process(model))
        assert made.group.epoch > 1
        assert made.stale_replies >= 1


def test_a_reply_of_a_past_epoch_is_dropped_and_a_command_of_one_refused(nursery, model):
    with gang(nursery) as made:
        made.velocity(*inputs(model))
        leader = made._roster.members[0]
        made._roster.send(leader, encode({"op": "velocity", "epoch": 0, "seq": 77, "cfg": 1.0}))
        assert torch.equal(made.velocity(*inputs(model)), one_process(model))
        assert made.stale_replies == 1
        assert made.group.degree == 4
        assert made.recoveries == []


def test_a_warned_rank_finishes_the_step_and_leaves(nursery, model):
    with gang(nursery) as made:
        made.velocity(*inputs(model))
        victim = made.pids[GPUS[0]]
        soon(lambda: made.warn(GPUS[0]))
        made.velocity(*inputs(model, MID_STEP))
        assert made.group.degree == 4  # the step in flight was not disturbed
        assert torch.equal(made.velocity(*inputs(model)), one_process(model))
        assert made.group.members == tuple(GPUS[1:])
        assert "warned" in made.recoveries[0].reason
        assert_gone([victim])


def test_a_replacement_joins_between_steps_with_the_current_weights(nursery, model):
    new = gang_models.tiny({"seed": 9})
    with gang(nursery, GPUS[:3]) as made:
        made.velocity(*inputs(model))
        tensors = weights.live_parameters(new.transformer)
        assert made.bind(tensors) == weights.probe(new.transformer)
        x, t, cond = inputs(model)
        with torch.no_grad():
            want = gang_models.TinyAdapter.velocity(
                new, x, t, gang_models.TinyAdapter.encode(model, ["12", "345"])
            )
        assert torch.equal(made.velocity(x, t, cond), want)
        made.add([GPUS[3]])
        made.wait_ready()
        assert torch.equal(made.velocity(x, t, cond), want)
        assert made.group.degree == 4
        made.bind(weights.live_parameters(model.transformer))  # and the next version reaches all of them
        assert torch.equal(made.velocity(x, t, cond), one_process(model))


def test_weights_that_do_not_fit_are_refused_and_the_gang_goes_on(nursery, model):
    with gang(nursery, GPUS[:2]) as made:
        with pytest.raises(IntegrityError, match="match"):
            made.bind({"nothing.here": torch.ones(2)})
        made.bind(weights.live_parameters(model.transformer))
        assert torch.equal(made.velocity(*inputs(model)), one_process(model))


def test_a_group_spans_nodes_where_one_has_too_few_gpus(nursery, model):
    """Memory asks for four ranks, each node has two."""
    gpus = [Gpu(node, i) for node in "ab" for i in range(2)]
    limits = Limits(heads=4, row_bytes=1, gpu_bytes=8)
    with gang({"a": nursery, "b": nursery}, gpus, limits) as made:
        assert torch.equal(made.velocity(*inputs(model)), one_process(model))
        assert made.group.nodes == ("a", "b")
        soon(kill(made, gpus[3]))
        with pytest.raises(CommError, match="too few for any legal group"):
            made.velocity(*inputs(model, MID_STEP))


def test_an_impossible_degree_is_refused_with_the_reason(nursery, model):
    limits = Limits(heads=4, even_heads=True)
    refusal = pytest.raises(ConfigError, match="4 attention heads do not split evenly over 3 ranks")
    with gang(nursery, GPUS[:3], degree=3, limits=limits) as made, refusal:
        made.velocity(*inputs(model))


def test_an_error_of_the_model_is_told_and_not_repeated(nursery, model):
    with gang(nursery) as made:
        x, t, cond = inputs(model)
        with pytest.raises(RunError, match="a rank of gang test failed"):
            made.velocity(torch.zeros(2, 5, 16, 32), t, cond)
        assert torch.equal(made.velocity(x, t, cond), one_process(model))
        assert made.live == tuple(GPUS)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        encode({"op": "hello", "token": "0" * 32}),
        encode({"op": "hello", "token": ["not", "text"]}),
        encode({"op": "hello", "token": "x"}, {"x": torch.ones(9)}),
        encode({"op": "ready"}),
    ],
)
def test_strangers_are_shown_out(nursery, model, words):
    with gang(nursery, GPUS[:2]) as made:
        with socket.create_connection(made._roster._listener.getsockname()) as stranger:
            stranger.sendall(words)
            stranger.settimeout(10)
            for _ in range(20):
                assert torch.equal(made.velocity(*inputs(model)), one_process(model))
            assert not made._roster._guests
            with contextlib.suppress(ConnectionError):  # a reset is a no, too
                assert stranger.recv(1) == b""
        assert made.group.degree == 2


def test_a_token_admits_one_process_once(nursery, model):
    with gang(nursery, GPUS[:2]) as made:
        token = made._roster.members[0].token
        second = Link(socket.create_connection(made._roster._listener.getsockname()))
        second.send({"op": "hello", "token": token})
        made.velocity(*inputs(model))
        made.velocity(*inputs(model))
        with pytest.raises(ConnectionError):
            second.read()
        second.close()


def children_of(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_left_after_fifty_random_losses(nursery, model):
    rng = random.Random(7)
    shm, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    zygote_descriptors = len(os.listdir(f"/proc/{nursery.pid}/fd"))
    struck = set()
    with gang(nursery, timing=Timing(heartbeat_s=0.1, dead_after_s=2, form_timeout_s=3)) as made:
        want = one_process(model)
        while len(struck) < 50:
            victim = rng.choice([gpu for gpu, pid in made.pids.items() if pid not in struck])
            struck.add(made.pids[victim])
            blow = kill(made, victim, how=rng.choice([signal.SIGKILL] * 4 + [signal.SIGSTOP]))
            timer = soon(blow, rng.uniform(0, 0.05))
            assert torch.equal(made.velocity(*inputs(model)), want)
            timer.join()
            if rng.random() < 0.5:
                assert torch.equal(made.velocity(*inputs(model)), want)
            made.add([gpu for gpu in GPUS if gpu not in made.pids])
            if len(made.pids) - len(struck & set(made.pids.values())) < 3:
                made.wait_ready()
        seen = struck | set(made.pids.values())
    assert_gone(seen)
    deadline = time.monotonic() + 10
    while children_of(nursery.pid):  # no zombie stays either
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert set(os.listdir("/dev/shm")) <= shm
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    assert len(os.listdir(f"/proc/{nursery.pid}/fd")) == zygote_descriptors


def test_ranks_end_with_their_zygote_even_frozen_ones(model):
    own = zygote()
    with gang(own, GPUS[:3]) as made:
        pids = list(made.pids.values())
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(own.pid, signal.SIGKILL)
        assert_gone(pids)
        with pytest.raises(RunError, match="zygote is gone"):
            made.add([Gpu("a", 9)])
        with pytest.raises(CommError, match="lost"):
            made.velocity(*inputs(model))
    own.close()


def test_ranks_end_with_their_gang(nursery, model):
    made = Gang("orphaned", {"a": nursery}, Limits(heads=4), 32, timing=TIMING)
    made.add(GPUS[:2])
    made.wait_ready()
    pids = list(made.pids.values())
    for member in made._roster.members:
        member.link.close()  # what a killed gang's kernel does
    assert_gone(pids)
    made._roster.members.clear()
    made.close()


def test_a_factory_that_fails_says_why():
    failing = zygote("gang_models:broken", path="/nowhere")
    with pytest.raises(RunError, match="no weights at /nowhere"):
        failing.wait_ready()


def test_a_factory_that_leaves_threads_is_refused():
    failing = zygote("gang_models:threaded")
    with pytest.raises(RunError, match="threads"):
        failing.wait_ready()


def test_an_unknown_factory_is_refused():
    failing = zygote("gang_models:nothing")
    with pytest.raises(RunError, match="nothing"):
        failing.wait_ready()
