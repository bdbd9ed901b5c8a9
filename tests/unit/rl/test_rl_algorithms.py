"""Every loss against a float64 reference that is written differently: scalars, distributions, numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from spotlight.config import AlgorithmConfig, SamplerConfig
from spotlight.errors import ConfigError
from spotlight.rl.algorithms import ALGORITHMS, Points, load_algorithm
from spotlight.rl.algorithms.clipped import clipped_objective
from spotlight.rl.algorithms.flow_grpo import gaussian_kl
from spotlight.rl.sampler import rollout_sampler

SDE = rollout_sampler(SamplerConfig(kind="sde", steps=5, noise_level=0.7))
CPS = rollout_sampler(SamplerConfig(kind="cps", steps=5, noise_level=0.8))
SAMPLERS = pytest.mark.parametrize("sampler", [SDE, CPS], ids=["sde", "cps"])
COUNT, SHAPE = 4, (1, 3, 4)


def draw(seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(COUNT, *SHAPE, generator=generator, dtype=torch.float64)


OLD, BASE = draw(2), draw(2) + draw(4, 0.1)
NEW = OLD + draw(3, 0.05)
ADVANTAGE = torch.tensor([1.5, -0.7, 0.2, -3.0], dtype=torch.float64)


def on_trajectory(sampler) -> Points:
    x, z = draw(1), draw(5)
    steps = tuple(range(4))
    x_next = sampler.step(x, OLD, steps, z)
    old_log_prob = sampler.log_prob(x_next, x, OLD, steps)
    t = torch.tensor([sampler.sigmas[step] for step in steps], dtype=torch.float64)
    return Points(x, t, steps, ADVANTAGE, draw(6), z, x_next, old_log_prob)


def on_forward_process() -> Points:
    clean, noise = draw(6), draw(5)
    t = torch.tensor([1.0, 0.8, 0.6, 0.4], dtype=torch.float64)
    tt = t.view(-1, 1, 1, 1)
    return Points((1 - tt) * clean + tt * noise, t, (0, 1, 2, 3), ADVANTAGE, clean, noise)


def make(kind: str, sampler=SDE, **options):
    return load_algorithm(AlgorithmConfig(kind=kind, **options), sampler)


def law(sampler, points: Points, i: int, v: Tensor) -> torch.distributions.Normal:
    """The step's Gaussian from the formulas, not from the sampler's table."""
    t, t_next = sampler.sigmas[points.steps[i]], sampler.sigmas[points.steps[i] + 1]
    x, dt = points.x[i], t_next - t
    if sampler is SDE:
        s = 0.7 * math.sqrt(t / (1 - (t if t < 1 else sampler.sigmas[1])))
        return torch.distributions.Normal(
            x + (v + s * s / (2 * t) * (x + (1 - t) * v)) * dt, s * math.sqrt(-dt)
        )
    angle = 0.8 * math.pi / 2
    mean = (1 - t_next) * (x - t * v) + t_next * math.cos(angle) * (x + (1 - t) * v)
    return torch.distributions.Normal(mean, t_next * math.sin(angle))


def clipped(ratio: float, advantage: float, clip: float) -> float:
    bounded = min(max(ratio, 1 - clip), 1 + clip)
    return -min(ratio * advantage, bounded * advantage)


# --- the clipped objective


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.0, 2.0, -2.0), (1.5, 2.0, -2.2), (0.5, 2.0, -1.0), (0.5, -2.0, 1.8), (1.5, -2.0, 3.0)],
)
def test_the_clip_takes_the_worse_of_the_two(ratio, advantage, expected):
    loss, metrics = clipped_objective(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), 0.1)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["clip_fraction"]) == (ratio != 1)
    assert float(metrics["ratio_dev"]) == pytest.approx(abs(ratio - 1), abs=1e-6)


def test_a_clipped_point_has_no_gradient():
    log_ratio = torch.tensor([0.5, 0.5], requires_grad=True)
    clipped_objective(log_ratio, torch.tensor([1.0, -1.0]), 0.1)[0].sum().backward()
    assert log_ratio.grad[0] == 0
    assert log_ratio.grad[1] > 0


# --- Flow-GRPO


@SAMPLERS
def test_flow_grpo_loss(sampler):
    points = on_trajectory(sampler)
    algorithm = make("flow_grpo", sampler, clip=0.01, kl=0.3)
    loss, metrics = algorithm.loss(points, NEW, base=BASE)
    for i in range(COUNT):
        new, old, base = (law(sampler, points, i, v[i]) for v in (NEW, OLD, BASE))
        log_ratio = (new.log_prob(points.x_next[i]) - old.log_prob(points.x_next[i])).mean()
        kl = torch.distributions.kl_divergence(new, base).mean()
        expected = clipped(math.exp(log_ratio), float(ADVANTAGE[i]), 0.01) + 0.3 * kl
        assert float(loss[i]) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
        assert float(metrics["kl"][i]) == pytest.approx(float(kl), rel=1e-4)
        assert float(metrics["ratio_dev"][i]) == pytest.approx(abs(math.exp(log_ratio) - 1), abs=1e-5)


def test_the_kl_is_the_closed_form_of_the_sde_step():
    """|dt|/2 (1/s + s (1 - t)/(2t))^2 |dv|^2 per element."""
    points = on_trajectory(SDE)
    found = gaussian_kl(SDE, points, NEW, BASE)
    for i, step in enumerate(points.steps):
        t = SDE.sigmas[step]
        s = 0.7 * math.sqrt(t / (1 - (t if t < 1 else SDE.sigmas[1])))
        factor = (t - SDE.sigmas[step + 1]) / 2 * (1 / s + s * (1 - t) / (2 * t)) ** 2
        assert float(found[i]) == pytest.approx(factor * float((NEW - BASE)[i].square().mean()), rel=1e-6)


@SAMPLERS
@pytest.mark.parametrize("kind", ["flow_grpo", "grpo_guard"])
def test_unchanged_weights_give_ratio_one_and_the_plain_policy_gradient(kind, sampler):
    points = on_trajectory(sampler)
    v = OLD.clone().requires_grad_(True)
    loss, metrics = make(kind, sampler).loss(points, v)
    assert float(metrics["ratio_dev"].max()) < 1e-12
    loss.sum().backward()
    log_prob = [law(sampler, points, i, v[i]).log_prob(points.x_next[i]).mean() for i in range(COUNT)]
    weight = -ADVANTAGE
    if kind == "grpo_guard":
        widths = [law(sampler, points, i, v[i].detach()).scale.flatten()[0] for i in range(COUNT)]
        dts = [sampler.sigmas[step] - sampler.sigmas[step + 1] for step in points.steps]
        weight = weight * torch.tensor([w / dt for w, dt in zip(widths, dts, strict=True)])
    (expected,) = torch.autograd.grad((torch.stack(log_prob) * weight).sum(), v)
    assert torch.allclose(v.grad, expected, rtol=1e-4, atol=1e-7)


# --- GRPO-Guard


@SAMPLERS
def test_grpo_guard_loss(sampler):
    points = on_trajectory(sampler)
    loss, _ = make("grpo_guard", sampler, clip=0.001, kl=0.3).loss(points, NEW, base=BASE)
    for i, step in enumerate(points.steps):
        new, old, base = (law(sampler, points, i, v[i]) for v in (NEW, OLD, BASE))
        kappa = float(new.scale.flatten()[0])
        log_ratio = float((new.log_prob(points.x_next[i]) - old.log_prob(points.x_next[i])).mean())
        b = float((new.mean - old.mean).square().mean()) / (2 * kappa**2)
        dt = sampler.sigmas[step] - sampler.sigmas[step + 1]
        expected = clipped(math.exp((log_ratio + b) * kappa), float(ADVANTAGE[i]), 0.001) / dt
        expected += 0.3 * float(torch.distributions.kl_divergence(new, base).mean())
        assert float(loss[i]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_grpo_guard_centres_the_ratio():
    """Averaged over the old policy's own noise the log-ratio is 0, where Flow-GRPO's is below 0."""
    count, step = 20_000, 2
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(count, 4, dtype=torch.float64)
    z = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    old = torch.ones_like(x)
    steps = (step,) * count
    x_next = SDE.step(x, old, steps, z)
    points = Points(
        x,
        torch.full((count,), 0.6),
        steps,
        torch.ones(count),
        x,
        z,
        x_next,
        SDE.log_prob(x_next, x, old, steps),
    )
    means = {
        kind: float(-make(kind, clip=1e9).loss(points, old + 0.3)[0].mean())
        for kind in ("flow_grpo", "grpo_guard")
    }
    dt = SDE.sigmas[step] - SDE.sigmas[step + 1]
    log_guard = math.log(means["grpo_guard"] * dt) / SDE.coefficients[step].std
    assert math.log(means["flow_grpo"]) < -0.01
    assert abs(log_guard) < 0.01


# --- DiffusionNFT


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nft_loss(beta):
    points = on_forward_process()
    advantage = torch.tensor([1.5, -0.7, 0.2, -9.0], dtype=torch.float64)
    points = Points(points.x, points.t, points.steps, advantage, points.clean, points.noise)
    algorithm = make("nft", nft_beta=beta, kl=0.3)
    loss, metrics = algorithm.loss(points, NEW, old=OLD, base=BASE)
    x, x0, v, old, base = (a.numpy() for a in (points.x, points.clean, NEW, OLD, BASE))
    for i in range(COUNT):
        t = float(points.t[i])
        r = min(max(min(max(float(advantage[i]), -5), 5) / 5 / 2 + 0.5, 0), 1)
        sides = {}
        for sign in (+1, -1):
            guess = x[i] - t * (old[i] + sign * beta * (v[i] - old[i]))
            weight = max(np.mean(np.abs(guess - x0[i])), 1e-5)
            sides[sign] = np.mean((guess - x0[i]) ** 2) / weight
        expected = 5 * (r * sides[1] + (1 - r) * sides[-1]) / beta
        kl = np.mean((v[i] - base[i]) ** 2)
        assert float(loss[i]) == pytest.approx(expected + 0.3 * kl, rel=1e-9)
        assert float(metrics["kl"][i]) == pytest.approx(kl, rel=1e-9)


def test_nft_gradient_is_proportional_to_the_advantage_and_points_to_good_samples():
    """At v = v_old both errors agree: d/dv = -c (2r - 1) 2 t e / (w n), e = x0^ - x0, w held fixed."""
    points = on_forward_process()
    v = OLD.clone().requires_grad_(True)
    make("nft", nft_beta=0.5).loss(points, v, old=OLD)[0].sum().backward()
    t = points.t.view(-1, 1, 1, 1)
    error = points.x - t * OLD - points.clean
    weight = error.abs().mean((1, 2, 3), keepdim=True)
    two_r_minus_one = (ADVANTAGE / 5).view(-1, 1, 1, 1)
    expected = -5 * two_r_minus_one * 2 * t * error / (weight * error[0].numel())
    assert torch.allclose(v.grad, expected, rtol=1e-9)
    closer = (points.x - t * (OLD - 1e-3 * v.grad) - points.clean).square().mean((1, 2, 3))
    now = error.square().mean((1, 2, 3))
    assert torch.equal(closer < now, ADVANTAGE > 0)


def test_nft_survives_a_perfect_guess():
    """Errors of exactly zero, of all values in binary."""
    clean, noise = torch.full((2, 1, 2, 2), 3.0), torch.full((2, 1, 2, 2), -1.0)
    half = torch.full((2,), 0.5)
    points = Points((clean + noise) / 2, half, (2, 2), torch.tensor([1.0, -1.0]), clean, noise)
    exact = (noise - clean).requires_grad_(True)
    loss, _ = make("nft").loss(points, exact, old=exact.detach())
    loss.sum().backward()
    assert not loss.any()
    assert not exact.grad.any()


def test_nft_holds_its_weights_fixed():
    points = on_forward_process()
    perturbed = OLD.clone().requires_grad_(True)
    value, _ = make("nft").loss(points, perturbed, old=NEW)
    value.sum().backward()
    step = 1e-6
    numeric = torch.zeros_like(OLD)
    for index in range(OLD[0].numel()):
        bump = torch.zeros_like(OLD).flatten(1)
        bump[:, index] = step
        up, down = (fixed_weight_nft(points, OLD + s * bump.view_as(OLD), OLD) for s in (1, -1))
        numeric.flatten(1)[:, index] = (up - down) / (2 * step)
    assert torch.allclose(perturbed.grad, numeric, rtol=1e-5, atol=1e-7)


def fixed_weight_nft(points: Points, v: Tensor, at: Tensor) -> Tensor:
    """The loss at `v` with the weights w of `at`; old velocity NEW, beta 1."""
    t = points.t.view(-1, 1, 1, 1)
    r = ADVANTAGE / 10 + 0.5
    total = torch.zeros(COUNT, dtype=torch.float64)
    for share, side in ((r, lambda u: u), (1 - r, lambda u: 2 * NEW - u)):
        error = points.x - t * side(v) - points.clean
        weight = (points.x - t * side(at) - points.clean).abs().mean((1, 2, 3))
        total += 5 * share * error.square().mean((1, 2, 3)) / weight
    return total


def test_nft_old_weights_lag_on_schedule():
    algorithm = make("nft", nft_old_decay_rate=0.1, nft_old_decay_max=0.35)
    assert [algorithm.old_decay(k) for k in range(5)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.35])


def test_the_published_schedules_of_the_old_policy():
    """By iteration; the second is the one for OCR."""
    first = make("nft")
    assert [first.old_decay(k) for k in (0, 1, 100, 500, 501)] == pytest.approx([0, 0.001, 0.1, 0.5, 0.5])
    second = make("nft", nft_old_decay_delay=75, nft_old_decay_rate=0.0075, nft_old_decay_max=0.999)
    found = [second.old_decay(k) for k in (0, 75, 76, 175, 208, 209)]
    assert found == pytest.approx([0, 0, 0.0075, 0.75, 0.9975, 0.999])


# --- AWM


def test_awm_loss():
    points = on_forward_process()
    loss, _ = make("awm", clip=0.02, kl=0.3).loss(points, NEW, old=OLD, base=BASE)
    target = (points.noise - points.clean).numpy()
    for i in range(COUNT):
        scores = [-np.mean((v[i].numpy() - target[i]) ** 2) for v in (NEW, OLD)]
        expected = clipped(math.exp(scores[0] - scores[1]), float(ADVANTAGE[i]), 0.02)
        expected += 0.3 * np.mean((NEW - BASE)[i].numpy() ** 2)
        assert float(loss[i]) == pytest.approx(expected, rel=1e-9)


def test_awm_gradient_is_advantage_weighted_flow_matching():
    points = on_forward_process()
    v = OLD.clone().requires_grad_(True)
    loss, metrics = make("awm").loss(points, v, old=OLD)
    assert not metrics["ratio_dev"].any()
    loss.sum().backward()
    expected = ADVANTAGE.view(-1, 1, 1, 1) * 2 * (OLD - points.noise + points.clean) / OLD[0].numel()
    assert torch.allclose(v.grad, expected, rtol=1e-9)


# --- the registry


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_every_algorithm_states_what_it_needs(kind):
    plain, with_kl = make(kind), make(kind, kl=0.1)
    assert (plain.needs_base, with_kl.needs_base) == (False, True)
    assert plain.needs_trajectory == (kind in ("flow_grpo", "grpo_guard"))
    assert plain.needs_noise == (kind == "grpo_guard")
    assert plain.needs_old == (kind in ("nft", "awm"))
    assert plain.samples_from_old == (kind == "nft")


@pytest.mark.parametrize("kind", ["flow_grpo", "grpo_guard"])
def test_a_ratio_needs_noise(kind):
    silent = rollout_sampler(SamplerConfig(kind="sde", steps=5, noise_level=0))
    with pytest.raises(ConfigError, match="log-probabilities are undefined"):
        make(kind, silent).loss(on_trajectory(SDE), NEW)
