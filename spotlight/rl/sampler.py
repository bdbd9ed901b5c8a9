"""Denoising steps and their log-probabilities.

x_t = (1 - t) x0 + t eps with t = sigma falling from 1 to 0, v = eps - x0, t' the next sigma, dt = t' - t <
0 and
a the noise level. Every step is affine in the latent and the velocity, x' = cx x + cv v + std z:

* ODE (Euler): mean = x + v dt, std = 0.
* SDE (Flow-GRPO, arXiv 2505.05470): s = a sqrt(t / (1 - t~)), t~ = t except sigmas[1] at t = 1;
  mean = x + [v + s^2/(2t) (x + (1 - t) v)] dt, std = s sqrt(-dt).
* CPS (coefficients-preserving sampling): x0^ = x - t v, x1^ = x + (1 - t) v;
  mean = (1 - t') x0^ + t' cos(a pi/2) x1^, std = t' sin(a pi/2).

Steps outside the window, and always the last one, are Euler steps. The window belongs to the sampler, so it
is common to a group, its drafts and its finals.

The log-probability is the mean over elements of the Gaussian log density, in fp32, for SDE and CPS alike.
(The public Flow-GRPO code drops the constants and 1/(2 std^2) for CPS; its clip values for CPS are in those
units.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from spotlight.config import SamplerConfig
from spotlight.errors import ConfigError

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def shifted_sigmas(steps: int, shift: float = 1.0, terminal: float = 0.0) -> tuple[float, ...]:
    """`steps` + 1 values from 1 to 0: linspace(1, 1/steps, steps), shifted, and a closing 0.

    With `terminal` the values before the 0 are stretched to end there, as Qwen-Image's scheduler does. A
    scheduler's exponential time shift by mu is `shift` = exp(mu).
    """
    if steps < 1 or shift <= 0:
        raise ValueError(f"need steps >= 1 and shift > 0, got {steps} and {shift}")
    plain = [1 - i / steps for i in range(steps)]
    shifted = [shift * t / (1 + (shift - 1) * t) for t in plain]
    if terminal and steps > 1:
        scale = (1 - terminal) / (1 - shifted[-1])
        shifted = [1 - (1 - t) * scale for t in shifted]
    return (*shifted, 0.0)


@dataclass(frozen=True, slots=True)
class Affine:
    """One step: x' = x * `x` + v * `v` + z * `std`."""

    x: float
    v: float
    std: float


@dataclass(frozen=True)
class Sampler:
    """A recipe for denoising. Equal recipes have equal `key`s; a state resumes only under its own."""

    kind: str
    sigmas: tuple[float, ...]
    noise_level: float = 0.0
    window: tuple[int, int] = (0, 0)  # stochastic steps [start, stop)
    cfg: float = 1.0

    def __post_init__(self) -> None:
        if (
            len(self.sigmas) < 2
            or self.sigmas[-1] != 0
            or sorted(self.sigmas, reverse=True) != list(self.sigmas)
        ):
            raise ValueError(f"sigmas must fall to 0, got {self.sigmas}")
        if not self.sigmas[0] <= 1 or len(set(self.sigmas)) != len(self.sigmas):
            raise ValueError(f"sigmas must be distinct and at most 1, got {self.sigmas}")
        start, stop = self.window
        if not 0 <= start <= stop < len(self.sigmas) - 1 and stop:
            raise ConfigError(
                f"the stochastic window [{start}, {stop}) reaches the last of {self.steps} steps",
                hint="the last step is always deterministic; shorten sampler.window_size",
            )
        if self.kind == "cps" and self.noise_level > 1:
            raise ConfigError(
                f"sampler.noise_level {self.noise_level} is above 1, where CPS would subtract noise",
                hint="use a value in (0, 1]",
            )

    @property
    def steps(self) -> int:
        """Number of denoising steps."""
        return len(self.sigmas) - 1

    @property
    def stochastic_steps(self) -> range:
        """The steps that draw noise and have a log-probability."""
        return range(*self.window)

    @cached_property
    def key(self) -> str:
        """Digest of the recipe."""
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=8).hexdigest()

    @cached_property
    def coefficients(self) -> tuple[Affine, ...]:
        """One per step, computed in float64."""
        return tuple(self._coefficients(step) for step in range(self.steps))

    def step(self, x: Tensor, v: Tensor, steps: Sequence[int], noise: Tensor) -> Tensor:
        """x' of rows (B, ...) that may stand at different `steps`; fp32."""
        return self.mean(x, v, steps) + self._rows("std", steps, x) * noise

    def mean(self, x: Tensor, v: Tensor, steps: Sequence[int]) -> Tensor:
        """E[x' | x], shaped like `x`."""
        return self._rows("x", steps, x) * x + self._rows("v", steps, x) * v

    def std(self, steps: Sequence[int], like: Tensor) -> Tensor:
        """Standard deviation of x' given x, (B, 1, ...) in fp32 on the device of `like`."""
        return self._rows("std", steps, like)

    def log_prob(self, x_next: Tensor, x: Tensor, v: Tensor, steps: Sequence[int]) -> Tensor:
        """(B,): mean over elements of log N(x_next; mean(x, v), std^2), in fp32.

        Raises ConfigError where no noise was drawn: the density does not exist.
        """
        self.require_noise(steps)
        std = self._rows("std", steps, x)
        residual = (x_next - self.mean(x, v, steps)) / std
        constant = std.flatten().log() + HALF_LOG_2PI
        return -0.5 * residual.square().flatten(1).mean(1) - constant

    def require_noise(self, steps: Sequence[int]) -> None:
        """Raise ConfigError unless every one of `steps` draws noise."""
        silent = [step for step in steps if self.coefficients[step].std == 0]
        if silent:
            raise ConfigError(
                f"step {silent[0]} of this {self.kind} sampler (noise level {self.noise_level}) draws no "
                "noise: nothing is explored and log-probabilities are undefined",
                hint="set sampler.kind to sde or cps and sampler.noise_level above 0, or train with "
                "algorithm.kind=nft",
            )

    def _coefficients(self, step: int) -> Affine:
        t, t_next = self.sigmas[step], self.sigmas[step + 1]
        dt = t_next - t
        if step not in self.stochastic_steps or self.kind == "ode":
            return Affine(1.0, dt, 0.0)
        if self.kind == "sde":
            s = self.noise_level * math.sqrt(t / (1 - (self.sigmas[1] if t == 1 else t)))
            drift = s * s * dt / (2 * t)
            return Affine(1 + drift, dt + drift * (1 - t), s * math.sqrt(-dt))
        kept = t_next * math.cos(self.noise_level * math.pi / 2)
        drawn = t_next * math.sin(self.noise_level * math.pi / 2)
        return Affine((1 - t_next) + kept, kept * (1 - t) - t * (1 - t_next), drawn)

    def _rows(self, name: str, steps: Sequence[int], like: Tensor) -> Tensor:
        values = [getattr(self.coefficients[step], name) for step in steps]
        column = torch.tensor(values, dtype=torch.float32, device=like.device)
        return column.view(-1, *[1] * (like.dim() - 1))


def rollout_sampler(config: SamplerConfig, *, steps: int | None = None) -> Sampler:
    """The sampler of finals; with `steps`, of drafts: the same family and noise, another number of steps."""
    count = steps or config.steps
    sigmas = shifted_sigmas(count, config.shift, config.shift_terminal)
    if config.kind == "ode":
        return Sampler("ode", sigmas, cfg=config.cfg)
    if steps and steps != config.steps:
        window = (min(config.window_start, count - 1), min(_window_stop(config, count), count - 1))
    else:
        window = (config.window_start, _window_stop(config, count))
    return Sampler(config.kind, sigmas, config.noise_level, window, config.cfg)


def evaluation_sampler(config: SamplerConfig) -> Sampler:
    """The deterministic sampler of validation images."""
    return Sampler(
        "ode", shifted_sigmas(config.eval_steps, config.shift, config.shift_terminal), cfg=config.cfg
    )


def _window_stop(config: SamplerConfig, steps: int) -> int:
    return config.window_start + config.window_size if config.window_size else steps - 1
