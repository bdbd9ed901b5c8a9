"""The denoising loop, which can be cut after any step and resumed in another process.

All that a step needs is in its `DenoiseState`: noise is keyed, so no generator travels. Rows at different
steps share one forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from spotlight.errors import IntegrityError
from spotlight.rl import batching
from spotlight.rl.models import Conditioning, ModelAdapter
from spotlight.rl.noise import initial_noise, step_noise
from spotlight.rl.sampler import Sampler

STATE_FORMAT = 1
_FIELDS = ("row", "seed", "version", "step")


@dataclass(frozen=True, slots=True, eq=False)
class DenoiseState:
    """One sample between two steps. Tensors are fp32 on the CPU, latents without a batch dimension.

    `kept` holds x_t before each stochastic step taken so far and after the last of them, `log_probs` the
    log-probability of each; both stay empty where no trajectory is asked for.
    """

    row: int
    seed: int
    version: int  # of the weights that make it
    sampler_key: str
    step: int  # steps done
    latents: Tensor
    kept: Tensor  # (0..window + 1, *latent_shape)
    log_probs: Tensor  # (0..window,)

    @property
    def finite(self) -> bool:
        """Whether every number in it is one."""
        return bool(self.latents.isfinite().all() and self.log_probs.isfinite().all())

    def to_bytes(self) -> bytes:
        """Safetensors with the scalars as JSON metadata."""
        scalars: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        scalars |= {"format": STATE_FORMAT, "sampler_key": self.sampler_key}
        tensors = {"latents": self.latents, "kept": self.kept, "log_probs": self.log_probs}
        return save({name: t.contiguous() for name, t in tensors.items()}, {"state": json.dumps(scalars)})

    @classmethod
    def from_bytes(cls, blob: bytes) -> DenoiseState:
        """Inverse of `to_bytes`, bit for bit. Raises IntegrityError for anything else."""
        try:
            tensors = load(blob)
            scalars = _scalars(blob)
            if set(tensors) != {"latents", "kept", "log_probs"}:
                raise ValueError(f"tensors {sorted(tensors)}")
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise IntegrityError(f"not a denoising state ({len(blob)} bytes): {str(error)[:100]}") from None
        state = cls(sampler_key=scalars.pop("sampler_key"), **scalars, **tensors)
        _check_shapes(state)
        return state


def begin(
    row: int, seed: int, *, version: int, sampler: Sampler, run_seed: int, shape: Sequence[int]
) -> DenoiseState:
    """The state before the first step."""
    latents = initial_noise(run_seed, row, seed, shape)
    return DenoiseState(
        row, seed, version, sampler.key, 0, latents, latents.new_empty((0, *shape)), torch.empty(0)
    )


@torch.no_grad()
def denoise(
    adapter: ModelAdapter,
    sampler: Sampler,
    conditioning: Conditioning,
    states: Sequence[DenoiseState],
    *,
    run_seed: int,
    keep_trajectory: bool = False,
    negative: Conditioning | None = None,
    on_step: Callable[[list[DenoiseState]], bool] | None = None,
) -> list[DenoiseState]:
    """Take `states` (one per row of `conditioning`, at any step) to the end, in the order given.

    After each step `on_step` gets the states that moved; when it returns False the loop stops there.
    Raises IntegrityError for a state of another sampler, or without the trajectory that is asked for.
    """
    states = list(states)
    if conditioning.size != len(states):
        raise ValueError(f"{len(states)} states but {conditioning.size} conditionings")
    for state in states:
        _check_resumable(state, sampler, keep_trajectory)
    while moving := [i for i, state in enumerate(states) if state.step < sampler.steps]:
        some = len(moving) < len(states)
        moved = _advance(
            adapter,
            sampler,
            conditioning.index(moving) if some else conditioning,
            negative.index(moving) if negative is not None and some else negative,
            [states[i] for i in moving],
            run_seed,
            keep_trajectory,
        )
        for i, state in zip(moving, moved, strict=True):
            states[i] = state
        if on_step is not None and not on_step(moved):
            break
    return states


def _advance(
    adapter: ModelAdapter,
    sampler: Sampler,
    cond: Conditioning,
    negative: Conditioning | None,
    states: list[DenoiseState],
    run_seed: int,
    keep: bool,
) -> list[DenoiseState]:
    device = batching.device_of(adapter)
    steps = [state.step for state in states]
    x = torch.stack([state.latents for state in states]).to(device)
    t = torch.tensor([sampler.sigmas[step] for step in steps])
    v = batching.velocity(adapter, x, t, cond, negative=negative, cfg=sampler.cfg)
    x_next = sampler.step(x, v, steps, _noise(sampler, states, run_seed).to(device))
    log_probs = _log_probs(sampler, x_next, x, v, steps) if keep else {}
    return [
        _moved(state, sampler, latents, log_probs.get(i), keep)
        for i, (state, latents) in enumerate(zip(states, x_next.cpu(), strict=True))
    ]


def _log_probs(sampler: Sampler, x_next: Tensor, x: Tensor, v: Tensor, steps: list[int]) -> dict[int, Tensor]:
    """(1,) of each row whose step drew noise."""
    drawn = [i for i, step in enumerate(steps) if step in sampler.stochastic_steps]
    if not drawn:
        return {}
    if len(drawn) < len(steps):
        x_next, x, v, steps = x_next[drawn], x[drawn], v[drawn], [steps[i] for i in drawn]
    return dict(zip(drawn, sampler.log_prob(x_next, x, v, steps).cpu().split(1), strict=True))


def _moved(
    state: DenoiseState, sampler: Sampler, latents: Tensor, log_prob: Tensor | None, keep: bool
) -> DenoiseState:
    """The state a step later; `latents` is a row of a batch, which it must not keep alive."""
    kept, log_probs = state.kept, state.log_probs
    start, stop = sampler.window
    if keep and start < stop and start <= state.step <= stop:
        kept = torch.cat([kept, state.latents[None]])
    if log_prob is not None:
        log_probs = torch.cat([log_probs, log_prob])
    return replace(state, step=state.step + 1, latents=latents.clone(), kept=kept, log_probs=log_probs)


def _noise(sampler: Sampler, states: Sequence[DenoiseState], run_seed: int) -> Tensor:
    return torch.stack(
        [
            step_noise(run_seed, state.row, state.seed, state.step, state.latents.shape)
            if sampler.coefficients[state.step].std
            else torch.zeros_like(state.latents)
            for state in states
        ]
    )


def _check_resumable(state: DenoiseState, sampler: Sampler, keep: bool) -> None:
    who = f"state of row {state.row} seed {state.seed}"
    if state.sampler_key != sampler.key:
        raise IntegrityError(f"{who} was made by sampler {state.sampler_key}, not {sampler.key}")
    if state.step > sampler.steps:
        raise IntegrityError(f"{who} stands at step {state.step} of {sampler.steps}")
    start, stop = sampler.window
    drawn = max(0, min(state.step, stop) - start)
    if keep and len(state.log_probs) != drawn:
        raise IntegrityError(
            f"{who} has {len(state.log_probs)} log-probabilities where {drawn} steps drew noise"
        )


def _scalars(blob: bytes) -> dict[str, Any]:
    length = int.from_bytes(blob[:8], "little")
    scalars = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["state"])
    if scalars.pop("format") != STATE_FORMAT:
        raise ValueError("unknown format")
    if set(scalars) != {*_FIELDS, "sampler_key"} or not isinstance(scalars["sampler_key"], str):
        raise ValueError("wrong fields")
    for name in _FIELDS:
        if type(scalars[name]) is not int or scalars[name] < 0:
            raise ValueError(f"{name} is {scalars[name]!r}")
    return scalars


def _check_shapes(state: DenoiseState) -> None:
    tensors = (state.latents, state.kept, state.log_probs)
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        raise IntegrityError("a denoising state holds fp32 only")
    if state.kept.shape[1:] != state.latents.shape or state.log_probs.dim() != 1:
        raise IntegrityError("the tensors of a denoising state do not fit together")
