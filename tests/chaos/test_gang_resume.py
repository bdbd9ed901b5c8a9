"""A trajectory that is cut at one degree and goes on at another, in new processes, under real rl/ code."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from gang_setup import GPUS, gang, gang_models, zygote

from spotlight.rl.denoise import DenoiseState, begin, denoise
from spotlight.rl.sampler import Sampler, shifted_sigmas
from spotlight.runtime.gang import GangAdapter

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]
STEPS, CUT = 12, 5
SAMPLER = Sampler("sde", shifted_sigmas(STEPS), noise_level=0.7, window=(0, STEPS - 1), cfg=2.0)


@pytest.fixture(scope="module")
def nursery():
    made = zygote(delay_s=0.0)
    made.wait_ready()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model():
    return gang_models.tiny({})


def fresh(model):
    shape = model.latent_shape(16, 32)
    return [begin(row, 40 + row, version=0, sampler=SAMPLER, run_seed=3, shape=shape) for row in range(2)]


def run(adapter, model, states, on_step=None):
    cond, negative = model.encode(["12", "345"]), model.encode(["", ""])
    options = dict(run_seed=3, keep_trajectory=True, negative=negative, on_step=on_step)
    return denoise(adapter, SAMPLER, cond, states, **options)


def same(a, b):
    return all(
        torch.equal(x.latents, y.latents)
        and torch.equal(x.kept, y.kept)
        and torch.equal(x.log_probs, y.log_probs)
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def whole(model):
    return run(model, model, fresh(model))


@pytest.fixture(scope="module")
def cut(nursery, model):
    """Committed bytes at the cut, made by four ranks that are gone afterwards."""
    with gang(nursery, degree=4) as made:
        states = run(GangAdapter(model, made), model, fresh(model), on_step=lambda moved: moved[0].step < CUT)
        assert made.group.degree == 4
    assert [state.step for state in states] == [CUT] * 2
    return [state.to_bytes() for state in states]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_cut_at_four_ranks_and_resumed_at_another_degree(nursery, model, whole, cut, degree):
    with gang(nursery, degree=degree) as made:
        states = [DenoiseState.from_bytes(blob) for blob in cut]
        assert same(run(GangAdapter(model, made), model, states), whole)
        assert made.group.degree == degree


def test_ranks_lost_on_the_way_do_not_show_in_the_samples(nursery, model, whole):
    import os
    import signal

    with gang(nursery) as made:

        def lose_some(moved):
            if moved[0].step in (2, 6, 9):
                os.kill(made.pids[made.group.members[0]], signal.SIGKILL)
            if moved[0].step == 7:
                made.add([gpu for gpu in GPUS if gpu not in made.pids])
            return True

        assert same(run(GangAdapter(model, made), model, fresh(model), on_step=lose_some), whole)
        assert len(made.recoveries) >= 3
