"""From requests to scored images: everything a worker does between a grant and a commit.

Torch, but neither Ray nor a clock: the same studio serves explorers on spot nodes and the trainer's own GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from spotlight.config import RunConfig
from spotlight.core.types import Request
from spotlight.rl import batching, data, rewards
from spotlight.rl.denoise import DenoiseState, begin, denoise
from spotlight.rl.models import Conditioning, ModelAdapter
from spotlight.rl.sampler import Sampler, rollout_sampler


@dataclass(frozen=True, slots=True)
class Shot:
    """One request as it was granted: with the weights version to use and, if resumed, the state's bytes."""

    request: Request
    version: int
    state: bytes | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished request. `tensors` is what training needs; empty for drafts."""

    state: DenoiseState
    reward: float | None
    info: dict[str, Any]
    tensors: dict[str, Tensor]


class Studio:
    """Prompts, sampler and reward of a run around one model."""

    def __init__(self, adapter: ModelAdapter, config: RunConfig, *, keep_trajectory: bool) -> None:
        self.adapter = adapter
        self.config = config
        self._keep = keep_trajectory
        self._prompts = data.load(config.data.train, known=True)
        self._reward = rewards.combine(config.reward.train)
        self._shape = adapter.latent_shape(config.model.height, config.model.width)
        self._encode = lru_cache(maxsize=512)(self._encode_row)

    def start(self, shots: Sequence[Shot]) -> list[DenoiseState]:
        """The states to go on from: fresh noise, or what an earlier worker had reached.

        Raises IntegrityError for bytes that are not a state of this sampler.
        """
        return [
            DenoiseState.from_bytes(shot.state)
            if shot.state is not None
            else begin(
                shot.request.sample.row,
                shot.request.sample.seed,
                version=shot.version,
                sampler=self.sampler(shot.request.num_steps),
                run_seed=self.config.seed,
                shape=self._shape,
            )
            for shot in shots
        ]

    def denoise(
        self,
        shots: Sequence[Shot],
        states: Sequence[DenoiseState],
        on_step: Callable[[list[DenoiseState]], bool],
    ) -> list[DenoiseState]:
        """Move all states to the end, or as far as `on_step` lets them. All shots share one batch key."""
        sampler = self.sampler(shots[0].request.num_steps)
        guided = sampler.cfg != 1
        rows = [shot.request.sample.row for shot in shots]
        return denoise(
            self.adapter,
            sampler,
            Conditioning.cat(self._encode(row) for row in rows),
            states,
            run_seed=self.config.seed,
            keep_trajectory=self._keep and shots[0].request.kind == "final",
            negative=batching.encode(self.adapter, [""] * len(rows)) if guided else None,
            on_step=on_step,
        )

    def finish(self, shots: Sequence[Shot], states: Sequence[DenoiseState]) -> list[Picture]:
        """Decode and score. A non-finite latent is a failed sample: reward None, whatever the scorer says."""
        prompts = [self._prompts[shot.request.sample.row] for shot in shots]
        images = self.decode([state.latents for state in states])
        scores = self._reward.score(images, [p.text for p in prompts], [p.metadata for p in prompts])
        return [
            Picture(
                state=state,
                reward=scores.values[i] if state.finite else None,
                info={name: column[i] for name, column in scores.info.items() if len(column) == len(shots)},
                tensors=_for_training(state) if shot.request.kind == "final" else {},
            )
            for i, (shot, state) in enumerate(zip(shots, states, strict=True))
        ]

    def decode(self, latents: Sequence[Tensor]) -> Tensor:
        """Images (B, C, H, W) in [0, 1] of latents without a batch dimension."""
        with torch.no_grad():
            return batching.decode(self.adapter, torch.stack(list(latents)))

    def sampler(self, num_steps: int) -> Sampler:
        """The run's sampler with another number of steps: a draft's, say."""
        return rollout_sampler(self.config.sampler, steps=num_steps)

    def _encode_row(self, row: int) -> Conditioning:
        return batching.encode(self.adapter, [self._prompts[row].text])


def _for_training(state: DenoiseState) -> dict[str, Tensor]:
    tensors = {"latents": state.latents}
    if len(state.kept):
        tensors |= {"kept": state.kept, "log_probs": state.log_probs}
    return tensors
