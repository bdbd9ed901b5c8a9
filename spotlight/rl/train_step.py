"""One iteration of training: rewarded samples in, changed weights and honest figures out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from spotlight.config import RunConfig
from spotlight.errors import TrainingError
from spotlight.rl import batching, ema, params
from spotlight.rl.advantage import Advantages, advantages
from spotlight.rl.algorithms import RATIO_DEVIATION, Points, load_algorithm
from spotlight.rl.batch import (
    PointRef,
    TrainSample,
    check_batch,
    forward_points,
    minibatches,
    trajectory_points,
)
from spotlight.rl.models import Conditioning, ModelAdapter
from spotlight.rl.sampler import Sampler, rollout_sampler
from spotlight.rl.trainer_state import pack, unpack

Metrics = dict[str, float]


class Trainer:
    """Holds the trained weights of `adapter`, the optimiser, and the weight sets that follow them.

    Full fine-tuning and LoRA differ only in which parameters are trainable.
    """

    def __init__(self, adapter: ModelAdapter, config: RunConfig, *, sampler: Sampler | None = None) -> None:
        self.adapter = adapter
        self.config = config
        self.sampler = sampler or rollout_sampler(config.sampler)
        self.algorithm = load_algorithm(config.algorithm, self.sampler)
        self._prepare()
        self.parameters = params.trainable_parameters(adapter.transformer)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.train.lr,
            betas=config.train.betas,
            weight_decay=config.train.weight_decay,
        )
        self.base = self._copy() if self.algorithm.needs_base else None
        self.old = self._copy() if self.algorithm.needs_old else None
        self.average = self._copy()
        self.bad_in_a_row = 0

    def train(self, batch: Sequence[TrainSample], iteration: int) -> Metrics:
        """Train on the samples of `iteration` (from 0): `updates` optimiser steps in a keyed order.

        Two calls from equal states on equal batches give equal bits. A batch that teaches nothing leaves the
        weights as they are. Raises IntegrityError (a sample twice, no trajectory) and TrainingError (the
        ratio is off 1 at the first update, too many non-finite steps in a row).
        """
        check_batch(batch, self.sampler, needs_trajectory=self.algorithm.needs_trajectory)
        chosen = self._advantages(batch)
        usable = [(i, value) for i, value in enumerate(chosen.values) if value is not None]
        tally = Tally()
        if usable:
            cond, negative = self._encode(batch)
            for update, refs in enumerate(self._minibatches(usable, iteration)):
                micro = self._points(batch, refs, iteration, cond, negative)
                self._update(micro, len(refs), tally, check_ratio=update == 0)
            self._follow(iteration)
        return self._merged(tally).metrics() | {
            "reward_mean": chosen.reward_mean,
            "reward_std": chosen.reward_std,
            "trained_samples": float(len(usable)),
            "dropped_samples": float(chosen.dropped_samples),
            "zero_variance_groups": float(chosen.zero_variance_groups),
        }

    def trainable(self) -> params.Weights:
        """The policy that roll-outs use, to be published: fp32 copies on the CPU."""
        return self._on_cpu(self._policy)

    def ema_tensors(self) -> params.Weights:
        """The averaged weights, which are evaluated and exported."""
        return self._on_cpu(self.average)

    @contextmanager
    def rolling_out(self) -> Iterator[None]:
        """For a while the transformer is the published policy, fit to be called by this process alone."""
        with params.bound(self.adapter.transformer, self._policy), self._gathered():
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The same with the averaged weights."""
        with params.bound(self.adapter.transformer, self.average), self._gathered():
            yield

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that changes while training, as named tensors and JSON-able values."""
        return pack(self, keep=self._keeps)

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Inverse of `state`, bit for bit. Raises IntegrityError and changes nothing when it does not fit."""
        unpack(self, tensors, meta)

    @property
    def _keeps(self) -> bool:
        return True

    @property
    def _policy(self) -> Mapping[str, Tensor]:
        return self.old if self.old is not None and self.algorithm.samples_from_old else self.parameters

    def _on_cpu(self, weights: Mapping[str, Tensor]) -> params.Weights:
        return params.on_cpu(weights, keep=self._keeps)

    def _gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _prepare(self) -> None:
        params.prepare(self.adapter, self.config.train, seed=self.config.seed)

    def _merged(self, tally: Tally) -> Tally:
        return tally

    def _copy(self) -> params.Weights:
        return {name: p.detach().float().clone() for name, p in self.parameters.items()}

    def _advantages(self, batch: Sequence[TrainSample]) -> Advantages:
        algorithm = self.config.algorithm
        return advantages(
            [sample.row for sample in batch],
            [sample.reward if sample.finite else None for sample in batch],
            normalise=algorithm.normalise,
            clip=algorithm.advantage_clip,
        )

    def _encode(self, batch: Sequence[TrainSample]) -> tuple[Conditioning, Conditioning | None]:
        cond = batching.encode(self.adapter, [sample.prompt for sample in batch])
        guided = self.sampler.cfg != 1
        return cond, batching.encode(self.adapter, [""] * len(batch)) if guided else None

    def _minibatches(self, usable: Sequence[tuple[int, float]], iteration: int) -> list[list[PointRef]]:
        sampler = self.sampler
        steps = sampler.stochastic_steps if self.algorithm.needs_trajectory else range(sampler.steps)
        return minibatches(
            usable,
            steps,
            updates=self.config.train.updates,
            steps_trained=self.config.algorithm.steps_trained,
            run_seed=self.config.seed,
            iteration=iteration,
        )

    def _points(
        self,
        batch: Sequence[TrainSample],
        refs: Sequence[PointRef],
        iteration: int,
        cond: Conditioning,
        negative: Conditioning | None,
    ) -> Iterator[tuple[Points, Conditioning, Conditioning | None]]:
        size = self.config.train.micro_batch
        common = {"run_seed": self.config.seed, "device": batching.device_of(self.adapter)}
        for start in range(0, len(refs), size):
            part = refs[start : start + size]
            if self.algorithm.needs_trajectory:
                wanted = self.algorithm.needs_noise
                points = trajectory_points(batch, part, self.sampler, with_noise=wanted, **common)
            else:
                points = forward_points(batch, part, self.sampler, iteration=iteration, **common)
            rows = [ref.sample for ref in part]
            yield points, cond.index(rows), None if negative is None else negative.index(rows)

    def _update(
        self,
        micro: Iterator[tuple[Points, Conditioning, Conditioning | None]],
        total: float,
        tally: Tally,
        *,
        check_ratio: bool,
    ) -> None:
        """One optimiser step over `total` points; the gradient does not depend on how they are divided."""
        self.optimizer.zero_grad(set_to_none=True)
        for points, cond, negative in micro:
            loss, metrics = self._loss(points, cond, negative)
            if check_ratio and RATIO_DEVIATION in metrics:
                tally.first_ratio_dev = max(tally.first_ratio_dev, self._check_ratio(metrics))
            (loss.sum() / total).backward()
            tally.add(loss.detach(), metrics)
        norm = self._clip_gradients()
        if math.isfinite(norm):
            self.optimizer.step()
            self.bad_in_a_row = 0
            tally.grad_norms.append(norm)
        else:
            tally.skipped_steps += 1
            self._count_bad_step()

    def _clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.train.max_grad_norm)
        return float(params.whole(norm))

    def _loss(
        self, points: Points, cond: Conditioning, negative: Conditioning | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        old = None if self.old is None else self._velocity_under(self.old, points, cond, negative)
        base = None if self.base is None else self._velocity_under(self.base, points, cond, negative)
        return self.algorithm.loss(points, self._velocity(points, cond, negative), old=old, base=base)

    def _velocity(self, points: Points, cond: Conditioning, negative: Conditioning | None) -> Tensor:
        return batching.velocity(
            self.adapter, points.x, points.t, cond, negative=negative, cfg=self.sampler.cfg
        )

    @torch.no_grad()
    def _velocity_under(
        self, weights: params.Weights, points: Points, cond: Conditioning, negative: Conditioning | None
    ) -> Tensor:
        with params.bound(self.adapter.transformer, weights):
            return self._velocity(points, cond, negative)

    def _check_ratio(self, metrics: Mapping[str, Tensor]) -> float:
        worst = float(metrics[RATIO_DEVIATION].max())
        tolerance = self.config.train.ratio_tolerance
        if not worst <= tolerance:
            raise TrainingError(
                f"the policy ratio is off 1 by {worst:.3g} before the first update (tolerance "
                f"{tolerance:g}): roll-out and training do not compute the same thing",
                hint="keep latents in fp32 and use one attention backend, dtype and guidance scale for both; "
                "train.ratio_tolerance widens the check",
            )
        return worst

    def _count_bad_step(self) -> None:
        self.bad_in_a_row += 1
        limit = self.config.train.max_bad_steps
        if self.bad_in_a_row >= limit:
            raise TrainingError(
                f"{self.bad_in_a_row} optimiser steps in a row had non-finite gradients "
                f"(train.max_bad_steps {limit})",
                hint="lower train.lr, or start from the last checkpoint",
            )

    def _follow(self, iteration: int) -> None:
        ema.follow(self.average, self.parameters, self.config.train.ema)
        if self.old is not None:
            ema.follow(self.old, self.parameters, self.algorithm.old_decay(iteration))


class Tally:
    """Sums over the points of an iteration."""

    def __init__(self) -> None:
        self.points = 0
        self.sums: dict[str, float] = {}
        self.first_ratio_dev = 0.0
        self.ratio_dev = 0.0
        self.grad_norms: list[float] = []
        self.skipped_steps = 0

    def add(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Count the points of a micro-batch in."""
        self.points += len(loss)
        for name, values in {"loss": loss, **metrics}.items():
            if name == RATIO_DEVIATION:
                self.ratio_dev = max(self.ratio_dev, float(values.max()))
            else:
                self.sums[name] = self.sums.get(name, 0.0) + float(values.sum())

    def metrics(self) -> Metrics:
        """Means over points; the largest |ratio - 1| at the first update and at any; mean gradient norm."""
        means = {name: value / self.points for name, value in self.sums.items()}
        norms = self.grad_norms
        return means | {
            RATIO_DEVIATION: self.first_ratio_dev,
            f"{RATIO_DEVIATION}_max": self.ratio_dev,
            "grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "updates": float(len(norms)),
            "skipped_steps": float(self.skipped_steps),
        }
