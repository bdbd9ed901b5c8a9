from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.random_sd3 import RandomSD3
from fakes.rl_runs import finish, prompt_of, start
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from spotlight.config import SamplerConfig
from spotlight.errors import IntegrityError
from spotlight.rl import batching
from spotlight.rl.denoise import DenoiseState, begin, denoise
from spotlight.rl.noise import initial_noise, step_noise
from spotlight.rl.sampler import Sampler, rollout_sampler

SAMPLERS = {
    "sde": SamplerConfig(kind="sde", steps=6),
    "sde_window": SamplerConfig(kind="sde", steps=6, window_start=1, window_size=2),
    "cps": SamplerConfig(kind="cps", steps=6, noise_level=0.8),
    "ode": SamplerConfig(kind="ode", steps=6),
    "guided": SamplerConfig(kind="sde", steps=6, cfg=2.5),
}
IDS = [(3, 0), (3, 1), (5, 0), (8, 65536), (1003, 0), (5, 2), (0, 0), (9, 9)]


@pytest.fixture(scope="module")
def adapter() -> RandomSD3:
    return RandomSD3()


@pytest.fixture(params=SAMPLERS, scope="module")
def sampler(request) -> Sampler:
    return rollout_sampler(SAMPLERS[request.param])


def same(first: DenoiseState, second: DenoiseState) -> bool:
    scalars = all(
        getattr(first, name) == getattr(second, name)
        for name in ("row", "seed", "version", "step", "sampler_key")
    )
    tensors = all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in ("latents", "kept", "log_probs")
    )
    return scalars and tensors


@pytest.fixture(scope="module")
def whole(adapter, sampler) -> list[DenoiseState]:
    return finish(adapter, sampler, start(IDS, sampler))


def test_it_follows_the_plain_loop(adapter, sampler, whole):
    """Against a loop over one sample, written without the library's loop."""
    row, seed = IDS[3]
    cond = batching.encode(adapter, [prompt_of(row)])
    negative = batching.encode(adapter, [""])
    x = initial_noise(0, row, seed, (1, 16, 32))[None]
    kept, log_probs = [], []
    for step in range(sampler.steps):
        if sampler.stochastic_steps and step in range(sampler.window[0], sampler.window[1] + 1):
            kept.append(x[0])
        with torch.no_grad():
            t = torch.tensor([sampler.sigmas[step]])
            v = adapter.velocity(x, t, cond, negative=negative, cfg=sampler.cfg)
        c = sampler.coefficients[step]
        mean = c.x * x + c.v * v
        x = mean + c.std * step_noise(0, row, seed, step, (1, 16, 32)) if c.std else mean
        if c.std:
            log_probs.append(torch.distributions.Normal(mean, c.std).log_prob(x).mean())
    state = whole[3]
    assert (state.row, state.seed, state.step) == (row, seed, sampler.steps)
    assert torch.allclose(state.latents, x[0], atol=1e-4)
    assert torch.allclose(state.kept, torch.stack(kept) if kept else state.kept[:0], atol=1e-4)
    assert torch.allclose(state.log_probs, torch.tensor(log_probs), atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
def test_chunking_changes_no_bit(adapter, sampler, whole, chunk):
    pieces = finish(adapter, sampler, start(IDS, sampler), chunk=chunk)
    assert all(same(a, b) for a, b in zip(pieces, whole, strict=True))


def test_order_and_company_change_no_bit(adapter, sampler, whole):
    backwards = finish(adapter, sampler, start(IDS[::-1], sampler))
    assert all(same(a, b) for a, b in zip(backwards[::-1], whole, strict=True))


def test_rows_of_equal_text_are_different_samples(adapter, sampler, whole):
    assert prompt_of(3) == prompt_of(1003)
    assert not torch.equal(whole[0].latents, whole[4].latents)


def test_states_cut_at_different_steps_finish_together_with_the_same_bits(adapter, sampler, whole):
    snapshots: dict[int, list[bytes]] = {0: [s.to_bytes() for s in start(IDS, sampler)]}

    def commit(states: list[DenoiseState]) -> bool:
        snapshots[states[0].step] = [state.to_bytes() for state in states]
        return True

    finish(adapter, sampler, start(IDS, sampler), on_step=commit)
    assert sorted(snapshots) == list(range(sampler.steps + 1))
    mixed = [DenoiseState.from_bytes(snapshots[i % (sampler.steps + 1)][i]) for i in range(len(IDS))]
    resumed = finish(adapter, sampler, mixed, chunk=3)
    assert all(same(a, b) for a, b in zip(resumed, whole, strict=True))


RESUME = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from fakes.random_sd3 import RandomSD3
from fakes.rl_runs import finish
from spotlight.config import SamplerConfig
from spotlight.rl.denoise import DenoiseState
from spotlight.rl.sampler import rollout_sampler
torch.manual_seed(123)
adapter, folder = RandomSD3(), Path(sys.argv[2])
for recipe in sorted(folder.glob("*.json")):
    sampler = rollout_sampler(SamplerConfig.model_validate_json(recipe.read_text()))
    for blob in sorted(folder.glob(recipe.stem + "-*.in")):
        state = DenoiseState.from_bytes(blob.read_bytes())
        blob.with_suffix(".out").write_bytes(finish(adapter, sampler, [state])[0].to_bytes())
"""


def test_a_sample_cut_at_any_step_ends_in_another_process_with_the_same_bytes(adapter, tmp_path):
    expected = {}
    for name, config in SAMPLERS.items():
        sampler = rollout_sampler(config)
        (tmp_path / f"{name}.json").write_text(config.model_dump_json())

        def commit(states: list[DenoiseState], name: str = name) -> bool:
            (tmp_path / f"{name}-{states[0].step}.in").write_bytes(states[1].to_bytes())
            return True

        done = finish(adapter, sampler, start(IDS, sampler), on_step=commit)
        (tmp_path / f"{name}-0.in").write_bytes(start(IDS, sampler)[1].to_bytes())
        expected[name] = done[1].to_bytes()
    tests = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", RESUME, tests, str(tmp_path)], check=True, timeout=50)
    outputs = list(tmp_path.glob("*.out"))
    assert len(outputs) == len(SAMPLERS) * 7
    assert all(path.read_bytes() == expected[path.name.split("-")[0]] for path in outputs)


def test_on_step_stops_the_loop_after_its_step(adapter, sampler):
    seen = []
    stopped = finish(
        adapter,
        sampler,
        start(IDS, sampler),
        on_step=lambda states: seen.append(len(states)) or len(seen) < 2,
    )
    assert seen == [8, 8]
    assert {state.step for state in stopped} == {2}


def test_finished_states_are_left_alone(adapter, sampler, whole):
    calls = []
    again = finish(adapter, sampler, whole, on_step=lambda states: calls.append(states) or True)
    assert not calls
    assert all(same(a, b) for a, b in zip(again, whole, strict=True))


def test_without_a_trajectory_nothing_is_kept_and_the_image_is_the_same(adapter, sampler, whole):
    lean = finish(adapter, sampler, start(IDS, sampler), keep=False)
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(lean, whole, strict=True))
    assert all(len(state.kept) == len(state.log_probs) == 0 for state in lean)


def test_the_weights_version_and_the_noise_of_the_run_travel_with_the_state(adapter, sampler):
    state = begin(3, 0, version=7, sampler=sampler, run_seed=1, shape=(1, 16, 32))
    other = finish(adapter, sampler, [state], run_seed=1)[0]
    assert other.version == 7
    assert not torch.equal(other.latents, finish(adapter, sampler, start(IDS[:1], sampler))[0].latents)


def test_a_half_precision_model_still_has_fp32_states():
    sampler = rollout_sampler(SAMPLERS["sde"])
    state = finish(RandomSD3(dtype=torch.bfloat16), sampler, start(IDS[:1], sampler))[0]
    assert {state.latents.dtype, state.kept.dtype, state.log_probs.dtype} == {torch.float32}
    assert state.finite


def test_a_state_of_another_sampler_is_refused(adapter):
    theirs = rollout_sampler(SAMPLERS["cps"])
    with pytest.raises(IntegrityError, match="made by sampler"):
        finish(adapter, rollout_sampler(SAMPLERS["sde"]), start(IDS[:1], theirs))


def test_a_state_without_its_trajectory_cannot_go_on_with_one(adapter):
    sampler = rollout_sampler(SAMPLERS["sde"])
    half = finish(adapter, sampler, start(IDS[:1], sampler), keep=False, on_step=lambda states: False)
    with pytest.raises(IntegrityError, match="0 log-probabilities where 1 steps"):
        finish(adapter, sampler, half)


def test_conditioning_must_match_the_states(adapter, sampler):
    with pytest.raises(ValueError, match="1 states but 2"):
        denoise(adapter, sampler, batching.encode(adapter, ["1", "2"]), start(IDS[:1], sampler), run_seed=0)


def test_a_non_finite_state_says_so(sampler):
    state = start(IDS[:1], sampler)[0]
    assert state.finite
    broken = state.latents.clone()
    broken[0, 0, 0] = float("inf")
    assert not replace(state, latents=broken).finite


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 4),
    st.tuples(*[st.integers(0, 2**63)] * 4),
)
def test_bytes_round_trip(shape, kept, scalars):
    row, seed, version, step = scalars
    state = DenoiseState(
        row,
        seed,
        version,
        "k",
        step,
        torch.randn(shape),
        torch.randn(kept, *shape),
        torch.randn(max(kept - 1, 0)),
    )
    assert same(DenoiseState.from_bytes(state.to_bytes()), state)


STATE = start([(1, 2)], rollout_sampler(SAMPLERS["sde"]))[0]
GOOD = {"row": 1, "seed": 2, "version": 0, "step": 0, "format": 1, "sampler_key": "k"}
TENSORS = {"latents": torch.zeros(1, 2), "kept": torch.zeros(0, 1, 2), "log_probs": torch.zeros(0)}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(STATE.to_bytes()) - 1))
def test_a_truncated_state_is_an_error(length):
    with pytest.raises(IntegrityError):
        DenoiseState.from_bytes(STATE.to_bytes()[:length])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_an_error(blob):
    with pytest.raises(IntegrityError):
        DenoiseState.from_bytes(blob)


@pytest.mark.parametrize(
    "change",
    [
        {"row": -1},
        {"seed": 1.5},
        {"step": True},
        {"version": None},
        {"format": 2},
        {"sampler_key": 3},
        {"extra": 1},
    ],
    ids=str,
)
def test_odd_scalars_are_an_error(change):
    DenoiseState.from_bytes(save(TENSORS, {"state": json.dumps(GOOD)}))
    with pytest.raises(IntegrityError):
        DenoiseState.from_bytes(save(TENSORS, {"state": json.dumps(GOOD | change)}))


@pytest.mark.parametrize(
    "change",
    [
        {"latents": torch.zeros(1, 2, dtype=torch.bfloat16)},
        {"kept": torch.zeros(1, 3)},
        {"log_probs": torch.zeros(1, 1)},
        {"more": torch.zeros(1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_odd_tensors_are_an_error(change):
    with pytest.raises(IntegrityError):
        DenoiseState.from_bytes(save(TENSORS | change, {"state": json.dumps(GOOD)}))


def test_a_state_without_metadata_is_an_error():
    for metadata in (None, {}, {"state": "[1, 2]"}, {"state": "{"}, {"other": "x"}):
        with pytest.raises(IntegrityError, match="not a denoising state"):
            DenoiseState.from_bytes(save(TENSORS, metadata))
