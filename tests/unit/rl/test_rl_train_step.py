from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from fakes.random_sd3 import RandomSD3
from fakes.rl_runs import finish, make_config, roll_out, start
from safetensors.torch import load, save

from spotlight.errors import IntegrityError, TrainingError
from spotlight.rl import params
from spotlight.rl.batch import minibatches
from spotlight.rl.sampler import evaluation_sampler
from spotlight.rl.train_step import Trainer

KINDS = ["flow_grpo", "grpo_guard", "nft", "awm"]
ALL = pytest.mark.parametrize("kind", KINDS)
MODES = pytest.mark.parametrize("mode", ["full", "lora"])


def trainer(
    kind: str = "flow_grpo", mode: str = "full", *, adapter: RandomSD3 | None = None, seed: int = 0, **train
) -> Trainer:
    config = make_config(
        seed=seed,
        algorithm={"kind": kind, "kl": train.pop("kl", 0.0), "steps_trained": train.pop("steps_trained", 0)},
        sampler={"cfg": train.pop("cfg", 1.0), **train.pop("sampler", {})},
        train={"mode": mode, "lora_rank": 4, "micro_batch": 16, **train},
    )
    return Trainer(adapter or RandomSD3(), config)


def weights(subject: Trainer) -> dict[str, torch.Tensor]:
    return params.snapshot(subject.adapter.transformer)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


# --- the ratio


@pytest.mark.parametrize("kind", ["flow_grpo", "grpo_guard", "awm"])
@MODES
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_the_ratio_is_exactly_one_at_the_first_update(kind, mode, chunk):
    subject = trainer(kind, mode, micro_batch=5)
    for iteration in range(2):
        metrics = subject.train(roll_out(subject, iteration, chunk=chunk), iteration)
        assert metrics["ratio_dev"] == 0
        assert metrics["ratio_dev_max"] > 0


def test_the_ratio_is_one_under_guidance_too():
    subject = trainer(cfg=2.5)
    assert subject.train(roll_out(subject), 0)["ratio_dev"] == 0


def test_latents_kept_in_bf16_are_caught_with_the_ratio_shown():
    subject = trainer()
    batch = [replace(s, kept=s.kept.bfloat16().float()) for s in roll_out(subject)]
    before = weights(subject)
    with pytest.raises(TrainingError, match=r"off 1 by [0-9.e-]+ before the first update") as caught:
        subject.train(batch, 0)
    assert "fp32" in caught.value.hint
    assert equal(weights(subject), before)


def test_log_probs_of_other_weights_are_caught():
    subject = trainer()
    batch = roll_out(subject)
    subject.train(batch, 0)
    with pytest.raises(TrainingError, match="off 1"):
        subject.train(batch, 1)


def test_a_non_finite_old_log_prob_is_a_dropped_sample():
    subject = trainer()
    batch = roll_out(subject)
    batch[3] = replace(batch[3], log_probs=torch.full_like(batch[3].log_probs, math.nan))
    assert subject.train(batch, 0)["dropped_samples"] == 1


# --- determinism and independence of the packing


@ALL
@MODES
def test_two_equal_runs_have_equal_bits(kind, mode):
    runs = []
    for _ in range(2):
        torch.rand(1)  # the global generator plays no part
        subject = trainer(kind, mode, kl=0.01)
        figures = [subject.train(roll_out(subject, i), i) for i in range(2)]
        runs.append((figures, weights(subject), subject.ema_tensors()))
    assert runs[0][0] == runs[1][0]
    assert equal(runs[0][1], runs[1][1])
    assert equal(runs[0][2], runs[1][2])


@ALL
def test_the_micro_batch_size_does_not_matter(kind):
    """One update, no Adam (which divides tiny gradients by themselves): the gradient agrees to rounding."""
    results = []
    for size in (3, 16, 64):
        subject = trainer(kind, updates=1, micro_batch=size, kl=0.01)
        start = weights(subject)
        subject.optimizer = torch.optim.SGD(subject.parameters.values(), lr=1.0)
        metrics = subject.train(roll_out(subject), 0)
        results.append((metrics, weights(subject)))
    moved = distance(results[0][1], start)
    for metrics, after in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-4, abs=1e-7)
        assert distance(after, results[0][1]) < 1e-3 * moved


def test_the_order_is_a_function_of_seed_and_iteration():
    usable = [(i, float(i)) for i in range(10)]

    def order(run_seed: int, iteration: int) -> list:
        return minibatches(
            usable, range(3), updates=3, steps_trained=2, run_seed=run_seed, iteration=iteration
        )

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


@pytest.mark.parametrize("samples", [1, 2, 7, 10])
@pytest.mark.parametrize("updates", [1, 3, 4])
@pytest.mark.parametrize("steps_trained", [0, 2, 9])
def test_every_sample_comes_in_one_update_with_distinct_steps(samples, updates, steps_trained):
    usable = [(5 * i, 0.5) for i in range(samples)]
    parts = minibatches(
        usable, range(2, 6), updates=updates, steps_trained=steps_trained, run_seed=1, iteration=2
    )
    assert len(parts) == min(samples, updates)
    sizes = [len(part) for part in parts]
    per_sample = 2 if steps_trained == 2 else 4
    assert max(sizes) - min(sizes) <= per_sample
    owners = [{ref.sample for ref in part} for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners)) == samples
    counts = Counter((ref.sample, ref.step) for part in parts for ref in part)
    assert set(counts.values()) == {1}
    assert len(counts) == samples * per_sample


def test_training_on_part_of_the_steps():
    subject = trainer(steps_trained=1)
    metrics = subject.train(roll_out(subject), 0)
    assert metrics["trained_samples"] == 16
    assert metrics["ratio_dev"] == 0


def test_a_window_trains_only_its_steps():
    subject = trainer(sampler={"steps": 6, "window_start": 1, "window_size": 2})
    batch = roll_out(subject)
    assert len(batch[0].kept) == 3
    assert subject.train(batch, 0)["ratio_dev"] == 0


# --- what teaches nothing


@ALL
def test_equal_rewards_pass_the_step_over(kind):
    subject = trainer(kind)
    before = weights(subject)
    metrics = subject.train(roll_out(subject, reward=lambda latents: 0.5), 0)
    assert (metrics["zero_variance_groups"], metrics["trained_samples"], metrics["updates"]) == (4, 0, 0)
    assert metrics["reward_mean"] == 0.5
    assert equal(weights(subject), before)
    assert equal(subject.ema_tensors(), before)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, "0.3"], ids=str)
def test_a_failed_reward_is_as_if_the_sample_were_not_there(bad):
    results = []
    for absent in (False, True):
        subject = trainer()
        batch = roll_out(subject)
        batch[5] = replace(batch[5], reward=bad)
        if absent:
            del batch[5]
        results.append((subject.train(batch, 0), weights(subject)))
    (with_bad, first), (without, second) = results
    assert (with_bad.pop("dropped_samples"), without.pop("dropped_samples")) == (1, 0)
    assert with_bad == without
    assert equal(first, second)


@ALL
def test_a_non_finite_latent_is_dropped_and_counted(kind):
    subject = trainer(kind)
    batch = roll_out(subject)
    batch[0] = replace(batch[0], latents=torch.full_like(batch[0].latents, math.nan))
    metrics = subject.train(batch, 0)
    assert metrics["dropped_samples"] == 1
    assert math.isfinite(metrics["loss"])
    assert all(w.isfinite().all() for w in weights(subject).values())


def test_an_empty_batch_changes_nothing():
    subject = trainer()
    before = weights(subject)
    assert subject.train([], 0)["updates"] == 0
    assert equal(weights(subject), before)


def test_groups_are_rows_not_texts():
    subject = trainer()
    batch = roll_out(subject, groups=1, size=4)
    twins = [replace(s, row=s.row + 1000 * (i % 2), reward=float(i % 2)) for i, s in enumerate(batch)]
    assert subject.train(twins, 0)["zero_variance_groups"] == 2


def test_a_sample_that_comes_twice_is_refused():
    subject = trainer()
    batch = roll_out(subject)
    with pytest.raises(IntegrityError, match="row 0 seed 0 comes twice"):
        subject.train([*batch, batch[0]], 0)


def test_a_sample_without_its_trajectory_is_refused():
    subject = trainer()
    batch = roll_out(subject)
    with pytest.raises(IntegrityError, match="no trajectory"):
        subject.train([replace(batch[0], kept=None)], 0)
    with pytest.raises(IntegrityError, match="3 latents and 3 log-probabilities"):
        subject.train([replace(batch[0], kept=batch[0].kept[:3])], 0)


# --- gradients that are not finite


class Poison(torch.autograd.Function):
    """Identity whose gradient can be made infinite."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class PoisonedSD3(RandomSD3):
    """While `factor` is not 1 every gradient is multiplied by it; outputs stay right."""

    factor = 1.0

    def velocity(self, *args, **kwargs):
        return Poison.apply(super().velocity(*args, **kwargs), self.factor)


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_non_finite_gradient_skips_the_step_and_is_counted(factor):
    adapter = PoisonedSD3()
    subject = trainer(adapter=adapter)
    before, batch = weights(subject), roll_out(subject)
    adapter.factor = factor
    metrics = subject.train(batch, 0)
    assert (metrics["skipped_steps"], metrics["updates"]) == (2, 0)
    assert equal(weights(subject), before)
    adapter.factor = 1.0
    metrics = subject.train(roll_out(subject, 1), 1)
    assert (metrics["skipped_steps"], metrics["updates"]) == (0, 2)
    assert subject.bad_in_a_row == 0
    assert not equal(weights(subject), before)
    assert all(w.isfinite().all() for w in weights(subject).values())


def test_too_many_bad_steps_in_a_row_stop_the_run():
    adapter = PoisonedSD3()
    subject = trainer(adapter=adapter, max_bad_steps=3)
    batch = roll_out(subject)
    adapter.factor = math.inf
    assert subject.train(batch, 0)["skipped_steps"] == 2
    with pytest.raises(TrainingError, match="3 optimiser steps in a row"):
        subject.train(batch, 1)


# --- weight sets


@ALL
def test_what_is_published_makes_the_trainers_samples(kind):
    subject, worker = trainer(kind, "lora"), RandomSD3()
    subject.train(roll_out(subject), 0)
    subject.train(roll_out(subject, 1), 1)
    params.prepare(worker, subject.config.train, seed=99)
    assert params.bind(worker.transformer, subject.trainable()) == len(subject.parameters)
    published = {name: tensor for name, tensor in subject.trainable().items()}
    assert equal(published, weights(subject)) == (kind != "nft")


def test_nft_rolls_out_from_the_lagging_weights():
    subject = trainer("nft")
    start = weights(subject)
    assert equal(subject.trainable(), start)
    subject.train(roll_out(subject), 0)
    first = weights(subject)
    assert equal(subject.trainable(), first)  # d is 0 after the first iteration
    subject.train(roll_out(subject, 1), 1)
    lagging, live = subject.trainable(), weights(subject)
    for name in live:
        assert torch.allclose(lagging[name], 0.001 * first[name] + 0.999 * live[name], atol=1e-7)
    assert not equal(lagging, live)


def test_the_average_moves_once_an_iteration():
    subject = trainer(ema=0.75)
    start = weights(subject)
    subject.train(roll_out(subject), 0)
    after = weights(subject)
    average = subject.ema_tensors()
    assert all(torch.allclose(average[n], 0.75 * start[n] + 0.25 * after[n], atol=1e-7) for n in start)


def test_published_tensors_are_copies():
    subject = trainer()
    before, average = subject.trainable(), subject.ema_tensors()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    subject.train(roll_out(subject), 0)
    assert equal(before, kept)
    assert equal(average, kept)


def test_lora_leaves_the_base_alone():
    subject = trainer(mode="lora", kl=0.1)
    frozen = {n: p.clone() for n, p in subject.adapter.transformer.named_parameters() if not p.requires_grad}
    metrics = subject.train(roll_out(subject), 0)
    after = dict(subject.adapter.transformer.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())
    assert metrics["kl"] > 0


@MODES
def test_the_kl_is_zero_until_the_weights_move(mode):
    subject = trainer(mode=mode, kl=0.1, updates=1)
    assert subject.train(roll_out(subject), 0)["kl"] == 0
    assert subject.train(roll_out(subject, 1), 1)["kl"] > 0


# --- learning


@ALL
@MODES
def test_it_learns(kind, mode):
    """The averaged weights' own pictures get brighter when that is rewarded, and darker when that is."""
    rate = 1e-3 if mode == "full" else 5e-3
    results = []
    for sign in (+1, -1):
        subject = trainer(kind, mode, lr=rate, micro_batch=64)
        results.append(-brightness(subject))
        for iteration in range(6):
            batch = roll_out(subject, iteration, size=8, reward=lambda latents: sign * float(latents.mean()))  # noqa: B023
            subject.train(batch, iteration)
        results[-1] += brightness(subject)
    assert results[0] > 0.02, results
    assert results[1] < -0.02, results


@torch.no_grad()
def brightness(subject: Trainer) -> float:
    sampler = evaluation_sampler(subject.config.sampler)
    with params.bound(subject.adapter.transformer, subject.ema_tensors()):
        done = finish(subject.adapter, sampler, start([(row, 7) for row in range(16)], sampler), keep=False)
    return float(torch.stack([state.latents for state in done]).mean())


# --- checkpoints


@ALL
@MODES
def test_two_iterations_a_checkpoint_and_two_more_equal_four(kind, mode):
    through = trainer(kind, mode, kl=0.01)
    expected = [through.train(roll_out(through, i), i) for i in range(4)]
    first = trainer(kind, mode, kl=0.01)
    figures = [first.train(roll_out(first, i), i) for i in range(2)]
    tensors, meta = first.state()
    second = trainer(kind, mode, kl=0.01)
    second.load_state(load(save(tensors)), meta)
    figures += [second.train(roll_out(second, i), i) for i in range(2, 4)]
    assert figures == expected
    assert equal(weights(second), weights(through))
    assert equal(second.ema_tensors(), through.ema_tensors())
    assert equal(second.trainable(), through.trainable())


def test_the_state_is_a_copy():
    subject = trainer()
    subject.train(roll_out(subject), 0)
    tensors, _ = subject.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    subject.train(roll_out(subject, 1), 1)
    assert equal(tensors, kept)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t, m: t.pop(next(iter(t))), "is missing"),
        (lambda t, m: t.update({"weights/none": torch.zeros(1)}), "is unknown"),
        (lambda t, m: t.update({"optimizer/exp_avg/none": torch.zeros(1)}), "belongs to no parameter"),
        (lambda t, m: t.update({next(iter(t)): torch.zeros(1)}), "not ("),
        (lambda t, m: m.update(format=99), "format 99"),
        (lambda t, m: m.pop("bad_in_a_row"), "format"),
    ],
    ids=["missing", "unknown", "moment", "shape", "format", "meta"],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil, said):
    subject = trainer()
    subject.train(roll_out(subject), 0)
    tensors, meta = subject.state()
    subject.train(roll_out(subject, 1), 1)
    before, now = subject.state()[0], dict(meta)
    spoil(tensors, now)
    with pytest.raises(IntegrityError) as caught:
        subject.load_state(tensors, now)
    assert said in caught.value.message
    assert equal(subject.state()[0], before)


def test_a_lora_state_does_not_load_into_full_training():
    lora, full = trainer(mode="lora"), trainer()
    with pytest.raises(IntegrityError, match="does not fit"):
        full.load_state(*lora.state())
