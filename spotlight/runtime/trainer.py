"""A training process: trains, publishes, validates, saves, and rolls out when there is nothing to train.

Its GPU holds one model, or its share of one. During a roll-out the published weights are in it, during training the
trained ones. Who else there is, and who calls what where: `runtime/trainers.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spotlight.core import events as ev
from spotlight.core.types import Outcome
from spotlight.observe import grids
from spotlight.rl import batching, data, distributed, export, hub, params, rewards
from spotlight.rl.batch import TrainSample
from spotlight.rl.denoise import begin, denoise
from spotlight.rl.models import load_model
from spotlight.rl.sampler import evaluation_sampler
from spotlight.rl.train_step import Metrics
from spotlight.runtime.place import Place, told
from spotlight.runtime.studio import Studio
from spotlight.store import checkpoint, weights

# The validation noise is the same in every run, so that scores of runs can be compared.
EVAL_RUN_SEED, EVAL_SEED = 0, 2**40
RESUMABLE_CHANGES = (
    "iterations",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "cluster",
    "budget",
    "observe",
)
GRID_IMAGES = 32
Evaluated = tuple[
    list[float | None], list[str], list[Any]
]  # scores; captions and uint8 pixels of the first ones
# A large text encoder takes its time, and a prompt's embedding is megabytes.
CHECKED_PROMPTS, ENCODED_AT_ONCE = 1024, 64


class TrainerProcess:
    """Number `rank` of `world`. Calls come one after the other; only `end_roll_out` comes in between."""

    def __init__(
        self, told: Mapping[str, Any], coordinator: Any, *, node: str, gpu: int, rank: int, world: int
    ) -> None:
        torch.set_num_threads(1)
        self._place = Place.of(told)
        self._config = self._place.config
        self._rank, self._world = rank, world
        self._coordinator, self._node, self._name = coordinator, node, f"{node}/{gpu}"
        self._meeting: Any = None
        self._ending = threading.Event()

    def host(self, address: str) -> int:
        """Open the place where all processes meet, at this machine's `address`; the port."""
        self._meeting = distributed.host(address)
        return int(self._meeting.port)

    def prepare(self, address: str, port: int) -> dict[str, Any]:
        """Join the others, load everything and encode prompts, so that what cannot be is found before any work.

        The first call. Not in the constructor: Ray tells its failures as text, the errors of a call as themselves.
        Returns facts about the base.
        """
        if self._world > 1:
            distributed.join(self._rank, self._world, address, port, meeting=self._meeting)
        self._load()
        if self._rank == 0:
            self._encode_all()
        transformer = self._adapter.transformer
        return {
            "model": self._adapter.name,
            "base": self._adapter.base_id,
            "parameters": sum(p.numel() for p in transformer.parameters()),
            "trainable": sum(p.numel() for p in self._trainer.parameters.values()),
            "device": str(batching.device_of(self._adapter)),
        }

    def _load(self) -> None:
        sharded = self._world > 1 and self._config.train.mode == "full"
        with hub.on_cpu(sharded):  # FSDP moves each part to the GPU as it shards it
            self._adapter = load_model(self._config.model)
        self._trainer = distributed.make_trainer(self._adapter, self._config)
        self._studio = Studio(
            self._adapter, self._config, keep_trajectory=self._trainer.algorithm.needs_trajectory
        )
        self._prompts = data.load(self._config.data.train, known=True)
        self._validation = data.load(self._config.data.validation)[: self._config.data.validation_size]
        self._held_out = rewards.load_reward(self._config.reward.held_out)
        self._weights = self._place.weights()
        self._artifacts = self._place.artifacts()
        self._worker = self._place.worker(
            coordinator=self._coordinator,
            studio=self._studio,
            admit=self._admit,
            name=self._name,
            node=self._node,
            role="on_demand",
        )

    def _encode_all(self) -> None:
        for prompts in (self._prompts[:CHECKED_PROMPTS], self._validation):
            for start in range(0, len(prompts), ENCODED_AT_ONCE):
                texts = [prompt.text for prompt in prompts[start : start + ENCODED_AT_ONCE]]
                batching.encode(self._adapter, texts)

    def publish(self, n: int) -> tuple[int, str, int] | None:
        """Store the weights that roll-outs use as version `n`."""
        tensors = self._trainer.trainable()
        if self._rank:
            return None
        version = self._weights.publish(tensors, n, self._adapter.base_id)
        self._weights.collect(keep=self._config.cluster.max_draft_lag + 2)
        return told(version)

    def join(self) -> None:
        """Become a worker too: call after the first version is published."""
        with self._trainer.rolling_out():
            self._worker.join()

    def roll_out(self) -> None:
        """Serve requests like everybody else, until `end_roll_out`."""
        with self._trainer.rolling_out():
            self._worker.serve(self._ending.is_set)
        self._ending.clear()  # not before: the word that ends this roll-out may have come already

    def end_roll_out(self) -> None:
        """There are no more finals."""
        self._ending.set()
        self._worker.end_pull()

    def train(self, iteration: int, outcomes: Sequence[Mapping[str, Any]]) -> Metrics:
        """Train on the committed finals of an iteration, in an order that does not depend on who made them."""
        decoded: list[Outcome] = [ev.decode({"type": "Outcome", **o}) for o in outcomes]
        samples = [self._sample(outcome) for outcome in sorted(decoded, key=lambda o: o.sample)]
        return self._trainer.train(samples, iteration)

    def evaluate(self) -> Evaluated:
        """Score the averaged weights on this process's share of the held-out prompts (ODE, fixed noise)."""
        share = self._validation[self._rank :: self._world]
        with self._trainer.averaged():
            if not share:
                return [], [], []
            images = self._draw(share)
        texts = [prompt.text for prompt in share]
        scores = self._held_out.score(images, texts, [prompt.metadata for prompt in share])
        readings = scores.info.get("reading")
        captions = (
            [f"{text} > {reading}" for text, reading in zip(texts, readings, strict=True)]
            if readings
            else texts
        )
        shown = len(range(self._rank, GRID_IMAGES, self._world))
        pixels = [grids.reduced(image) for image in _pixels(images[:shown])]
        return list(scores.values), captions[:shown], pixels

    def save(self, iteration: int, meta: Mapping[str, Any]) -> str:
        """Checkpoint: everything needed to go on with `iteration` as if nothing had happened. Its name."""
        tensors, state = self._trainer.state()
        if self._rank:
            return ""
        whole = {"trainer": state, "config": self._config.model_dump(mode="json"), **meta}
        return checkpoint.save(
            self._place.checkpoints(),
            iteration,
            {"trainer": tensors},
            whole,
            keep=self._config.keep_checkpoints,
        )

    def restore(self) -> dict[str, Any] | None:
        """Go back to the newest valid checkpoint: its meta with `iteration` and `skipped`; None: there is none."""
        found = checkpoint.load_latest(self._place.checkpoints())
        if found is None:
            return None
        checkpoint.require_same_config(
            found.meta["config"], self._config.model_dump(mode="json"), RESUMABLE_CHANGES
        )
        self._trainer.load_state(found.tensors["trainer"], found.meta["trainer"])
        return {**found.meta, "iteration": found.step, "skipped": list(found.skipped)}

    def rewind(self, iteration: int) -> None:
        """Forget weights and results that a checkpoint at `iteration` does not know of."""
        if self._weights.latest() is not None:
            self._weights.rewind(iteration)
        self._artifacts.discard(iteration)

    def discard(self, iteration: int) -> None:
        """Delete the results of an iteration that has been trained on."""
        self._artifacts.discard(iteration)

    def export(self) -> str:
        """Write the averaged weights in diffusers' layout, read them back, compare. Returns the folder."""
        folder, prompt = self._place.folder / "export", self._validation[0].text
        shape = self._adapter.latent_shape(self._config.model.height, self._config.model.width)
        tensors = self._trainer.ema_tensors()
        with self._trainer.averaged():
            expected = export.probe(self._adapter, shape, prompt)
        if self._rank == 0:
            export.export(
                tensors,
                self._config.train,
                folder,
                expected=expected,
                shape=shape,
                fresh=lambda: load_model(self._config.model),
                prompt=prompt,
            )
        return str(folder)

    def _admit(self, version: int) -> tuple[str, int]:
        live = params.trainable_parameters(self._adapter.transformer)
        return weights.probe(live), len(live)

    def _sample(self, outcome: Outcome) -> TrainSample:
        sample = outcome.sample
        prompt = self._prompts[sample.row].text
        if not outcome.digest:  # nothing stored: it failed, and is only counted
            blank = torch.zeros(
                self._adapter.latent_shape(self._config.model.height, self._config.model.width)
            )
            return TrainSample(sample.row, sample.seed, prompt, blank, None)
        tensors = self._artifacts.get(sample, outcome.version, outcome.digest)
        return TrainSample(
            sample.row,
            sample.seed,
            prompt,
            tensors["latents"],
            outcome.reward,
            tensors.get("kept"),
            tensors.get("log_probs"),
        )

    def _draw(self, prompts: Sequence[data.Prompt]) -> Tensor:
        sampler = evaluation_sampler(self._config.sampler)
        shape = self._adapter.latent_shape(self._config.model.height, self._config.model.width)
        images = []
        for start in range(0, len(prompts), self._config.train.micro_batch):
            part = prompts[start : start + self._config.train.micro_batch]
            states = [
                begin(p.row, EVAL_SEED, version=0, sampler=sampler, run_seed=EVAL_RUN_SEED, shape=shape)
                for p in part
            ]
            cond = batching.encode(self._adapter, [p.text for p in part])
            negative = batching.encode(self._adapter, [""] * len(part)) if sampler.cfg != 1 else None
            done = denoise(self._adapter, sampler, cond, states, run_seed=EVAL_RUN_SEED, negative=negative)
            images.append(self._studio.decode([state.latents for state in done]))
        return torch.cat(images)


def _pixels(images: Tensor) -> Any:
    """uint8 (B, H, W, C) of images (B, C, H, W) in [0, 1]."""
    return (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def result_image(folder: Path, config: Any, prompt: str, seed: int) -> Any:
    """Draw one prompt with a run's exported weights: uint8 (H, W, C). Raises NotFoundError, DataError."""
    torch.set_num_threads(1)
    adapter = load_model(config.model)
    export.load_export(adapter, folder)
    sampler = evaluation_sampler(config.sampler)
    shape = adapter.latent_shape(config.model.height, config.model.width)
    state = begin(0, seed, version=0, sampler=sampler, run_seed=EVAL_RUN_SEED, shape=shape)
    cond = batching.encode(adapter, [prompt])
    negative = batching.encode(adapter, [""]) if sampler.cfg != 1 else None
    done = denoise(adapter, sampler, cond, [state], run_seed=EVAL_RUN_SEED, negative=negative)
    return _pixels(batching.decode(adapter, done[0].latents[None]))[0]
