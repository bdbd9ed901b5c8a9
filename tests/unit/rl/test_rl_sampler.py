from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from spotlight.config import SamplerConfig
from spotlight.errors import ConfigError
from spotlight.rl.sampler import Sampler, evaluation_sampler, rollout_sampler, shifted_sigmas

SDE = rollout_sampler(SamplerConfig(kind="sde", steps=10, noise_level=0.7))
CPS = rollout_sampler(SamplerConfig(kind="cps", steps=10, noise_level=0.8))
ODE = rollout_sampler(SamplerConfig(kind="ode", steps=10))
STEPS = range(9)


def rows(count: int, seed: int = 0, shape: tuple[int, ...] = (2, 3, 5)) -> torch.Tensor:
    return torch.randn((count, *shape), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 4, 28])
def test_sigmas_are_those_of_the_diffusers_scheduler(steps, shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps))
    assert shifted_sigmas(steps, shift) == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)


@pytest.mark.parametrize(("pixels", "shift"), [(512, 1.7138), (1280, 2.2472)])
@pytest.mark.parametrize("steps", [2, 10, 50])
def test_a_stretched_schedule_is_qwen_images(steps, pixels, shift):
    """Its scheduler's published configuration; mu by the pipeline's own formula."""
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    mu = calculate_shift((pixels // 16) ** 2, 256, 8192, 0.5, 0.9)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=mu)
    assert math.exp(mu) == pytest.approx(shift, abs=1e-4)
    assert shifted_sigmas(steps, shift, 0.02) == pytest.approx(scheduler.sigmas.tolist(), abs=1e-4)
    sampler = rollout_sampler(SamplerConfig(kind="ode", steps=steps, shift=shift, shift_terminal=0.02))
    assert sampler.sigmas == shifted_sigmas(steps, shift, 0.02)


@pytest.mark.parametrize("step", STEPS)
def test_sde_step_is_the_formula_of_flow_grpo(step):
    x, v, z = rows(1, 1).double(), rows(1, 2).double(), rows(1, 3).double()
    t, t_next, a = SDE.sigmas[step], SDE.sigmas[step + 1], 0.7
    dt = t_next - t
    s = a * math.sqrt(t / (1 - (t if t < 1 else SDE.sigmas[1])))
    mean = x + (v + s**2 / (2 * t) * (x + (1 - t) * v)) * dt
    expected = mean + s * math.sqrt(t - t_next) * z
    assert torch.allclose(SDE.step(x, v, [step], z), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_cps_step_rebuilds_the_two_ends(step):
    x, v, z = rows(1, 1).double(), rows(1, 2).double(), rows(1, 3).double()
    t, t_next = CPS.sigmas[step], CPS.sigmas[step + 1]
    clean, noise = x - t * v, x + (1 - t) * v
    s = t_next * math.sin(0.8 * math.pi / 2)
    expected = (1 - t_next) * clean + math.sqrt(t_next**2 - s**2) * noise + s * z
    assert torch.allclose(CPS.step(x, v, [step], z), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_cps_preserves_the_coefficients_of_signal_and_noise(step):
    """From an exact x_t with an exact velocity: signal 1 - t', noise of total variance t'^2."""
    clean, noise = rows(1, 1), rows(1, 2)
    t, t_next = CPS.sigmas[step], CPS.sigmas[step + 1]
    x = (1 - t) * clean + t * noise
    mean = CPS.mean(x, noise - clean, [step])
    kept = (mean - (1 - t_next) * clean) / noise
    assert torch.allclose(kept, kept.flatten()[0].expand_as(kept), atol=1e-4)
    std = CPS.coefficients[step].std
    assert float(kept.mean()) ** 2 + std**2 == pytest.approx(t_next**2, rel=1e-4)


def test_ode_and_the_steps_outside_the_window_are_euler_steps():
    windowed = rollout_sampler(SamplerConfig(kind="sde", steps=10, window_start=2, window_size=3))
    assert windowed.stochastic_steps == range(2, 5)
    x, v = rows(1, 1), rows(1, 2)
    for sampler, steps in ((ODE, range(10)), (windowed, [0, 1, 5, 9]), (SDE, [9]), (CPS, [9])):
        for step in steps:
            dt = sampler.sigmas[step + 1] - sampler.sigmas[step]
            assert torch.equal(sampler.step(x, v, [step], rows(1, 3)), x + torch.tensor(dt) * v)


@pytest.mark.parametrize("sampler", [SDE, CPS], ids=["sde", "cps"])
@pytest.mark.parametrize("step", STEPS)
def test_log_prob_is_the_mean_gaussian_log_density(sampler, step):
    x, v, z = rows(3, 1), rows(3, 2), rows(3, 3)
    x_next = sampler.step(x, v, [step] * 3, z)
    c = sampler.coefficients[step]
    law = torch.distributions.Normal(c.x * x.double() + c.v * v.double(), c.std)
    expected = law.log_prob(x_next.double()).flatten(1).mean(1)
    assert torch.allclose(sampler.log_prob(x_next, x, v, [step] * 3).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampler", [SDE, CPS], ids=["sde", "cps"])
def test_log_prob_gradient_matches_finite_differences(sampler):
    x, v, z = rows(1, 1).double(), rows(1, 2).double().requires_grad_(True), rows(1, 3).double()
    x_next = sampler.step(x, v.detach(), [3], z)
    assert torch.autograd.gradcheck(lambda v: sampler.log_prob(x_next, x, v, [3]), v, atol=1e-6)


def gaussian_velocity(x: torch.Tensor, t: float, mean: float, std: float) -> torch.Tensor:
    """E[eps - x0 | x_t = x] for x0 ~ N(mean, std^2)."""
    total = (1 - t) ** 2 * std**2 + t**2
    centred = x - (1 - t) * mean
    clean = mean + (1 - t) * std**2 * centred / total
    return t * centred / total - clean


@pytest.mark.parametrize("noise_level", [0.3, 0.7])
def test_sde_keeps_the_marginals_of_the_ode(noise_level):
    """On Gaussian data, where the velocity is known exactly, every x_t has the law of the ODE's x_t."""
    data_mean, data_std, count, steps = 1.5, 0.4, 40_000, 400
    sampler = Sampler("sde", shifted_sigmas(steps), noise_level, (0, steps - 1))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, generator=generator)
    for step in range(steps):
        t = sampler.sigmas[step]
        noise = torch.randn(count, 1, generator=generator)
        x = sampler.step(x, gaussian_velocity(x, t, data_mean, data_std), [step] * count, noise)
        if step + 1 in (steps // 4, steps // 2, 3 * steps // 4, steps):
            t_next = sampler.sigmas[step + 1]
            std = math.sqrt((1 - t_next) ** 2 * data_std**2 + t_next**2)
            assert float(x.mean()) == pytest.approx((1 - t_next) * data_mean, abs=0.02)
            assert float(x.std()) == pytest.approx(std, rel=0.02)


def test_noise_level_zero_has_no_log_prob_and_divides_by_nothing():
    silent = rollout_sampler(SamplerConfig(kind="sde", steps=4, noise_level=0))
    x, v = rows(1, 1), rows(1, 2)
    assert torch.equal(silent.step(x, v, [0], rows(1, 3)), x - 0.25 * v)
    for sampler in (silent, rollout_sampler(SamplerConfig(kind="ode", steps=4))):
        with pytest.raises(ConfigError, match="log-probabilities are undefined") as caught:
            sampler.log_prob(x, x, v, [0])
        assert "noise_level" in caught.value.hint


def test_the_last_step_never_draws_noise():
    assert SDE.stochastic_steps == range(9)
    with pytest.raises(ConfigError, match="draws no noise"):
        SDE.log_prob(rows(1), rows(1), rows(1), [9])
    with pytest.raises(ConfigError, match="last of 4 steps"):
        Sampler("sde", shifted_sigmas(4), 0.7, window=(2, 4))
    assert len(rollout_sampler(SamplerConfig(kind="sde", steps=1)).stochastic_steps) == 0


def test_cps_refuses_a_noise_level_that_turns_the_cosine_negative():
    with pytest.raises(ConfigError, match="above 1"):
        Sampler("cps", shifted_sigmas(4), 1.2, window=(0, 3))


@pytest.mark.parametrize("sampler", [SDE, CPS, ODE], ids=["sde", "cps", "ode"])
def test_rows_at_different_steps_are_each_their_own_step(sampler):
    x, v, z = rows(10, 1), rows(10, 2), rows(10, 3)
    together = sampler.step(x, v, range(10), z)
    for step in range(10):
        alone = sampler.step(x[step : step + 1], v[step : step + 1], [step], z[step : step + 1])
        assert torch.equal(together[step], alone[0])


@pytest.mark.parametrize("shape", [(1, 16, 32), (16, 64, 64), (4096, 3)])
def test_log_prob_of_a_row_has_the_same_bits_in_every_batch(shape):
    x, v, z = (rows(9, seed, shape) for seed in (1, 2, 3))
    x_next = SDE.step(x, v, [4] * 9, z)
    whole = SDE.log_prob(x_next, x, v, [4] * 9)
    for size in (1, 2, 3, 4, 8):
        parts = [slice(at, at + size) for at in range(0, 9, size)]
        pieces = [SDE.log_prob(x_next[p], x[p], v[p], [4] * len(x[p])) for p in parts]
        assert torch.equal(torch.cat(pieces), whole)


def test_the_key_tells_recipes_apart():
    base = SamplerConfig(kind="sde", steps=10, noise_level=0.7)
    others = [
        {"steps": 11},
        {"noise_level": 0.8},
        {"window_size": 2},
        {"shift": 2.0},
        {"cfg": 2.0},
        {"kind": "cps"},
        {"kind": "ode"},
    ]
    keys = {rollout_sampler(base.model_copy(update=change)).key for change in others}
    assert len(keys | {SDE.key}) == len(others) + 1
    assert rollout_sampler(base).key == SDE.key


def test_a_draft_with_fewer_steps_has_the_same_family_and_noise():
    config = SamplerConfig(kind="sde", steps=10, noise_level=0.7, window_start=2, window_size=4, cfg=2.0)
    draft = rollout_sampler(config, steps=4)
    assert (draft.kind, draft.noise_level, draft.cfg, draft.steps) == ("sde", 0.7, 2.0, 4)
    assert draft.stochastic_steps == range(2, 3)
    assert rollout_sampler(config, steps=10) == rollout_sampler(config)


def test_validation_images_are_deterministic():
    sampler = evaluation_sampler(SamplerConfig(kind="sde", steps=4, eval_steps=7, cfg=3.0))
    assert (sampler.kind, sampler.steps, sampler.cfg) == ("ode", 7, 3.0)
    assert not sampler.stochastic_steps


@pytest.mark.parametrize("sigmas", [(1.0,), (0.5, 1.0, 0.0), (1.0, 0.5), (1.0, 1.0, 0.0), (2.0, 0.0)])
def test_odd_schedules_are_misuse(sigmas):
    with pytest.raises(ValueError, match="sigmas"):
        Sampler("ode", sigmas)
