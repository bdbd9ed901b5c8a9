"""Results in the layouts that diffusers loads, each read back and compared before it counts.

An adapter that loads with a warning and does nothing looks like a result; so after every export a fresh model
takes the files and must give the trainer's outputs, and other outputs than the base.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from spotlight.config import TrainConfig
from spotlight.errors import IntegrityError
from spotlight.rl import batching, lora
from spotlight.rl.models import ModelAdapter
from spotlight.rl.noise import initial_noise
from spotlight.rl.params import bound

LORA_FILE = "pytorch_lora_weights.safetensors"
PROBE_TIMES = (1.0, 0.75, 0.5, 0.25)


def export(
    adapter: ModelAdapter,
    weights: Mapping[str, Tensor],
    config: TrainConfig,
    folder: Path,
    *,
    shape: tuple[int, ...],
    fresh: Callable[[], ModelAdapter],
    prompt: str = "",
) -> Path:
    """Write `weights` into `folder`, read them back into a `fresh()` base model, compare.

    LoRA: `pytorch_lora_weights.safetensors` for `load_lora_weights(folder)`. Full: `transformer/` for
    `from_pretrained(folder, subfolder="transformer")`. `shape` is one latent's. The folder is replaced only
    by an export that passed. Returns the path that was written; raises IntegrityError.
    """
    staged = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    with bound(adapter.transformer, weights):
        expected = _probe(adapter, shape, prompt)
        written = _write(adapter, weights, config, staged)
    _compare(fresh(), staged, config, shape, prompt, expected)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(staged, folder)
    return folder / written


def load_export(adapter: ModelAdapter, folder: Path) -> None:
    """Put an export into a freshly loaded adapter, through diffusers' own loaders."""
    transformer = adapter.transformer
    if (folder / LORA_FILE).exists():
        transformer.load_lora_adapter(str(folder), weight_name=LORA_FILE, prefix="transformer")
    else:
        loaded = type(transformer).from_pretrained(str(folder), subfolder="transformer")
        transformer.load_state_dict(loaded.state_dict())


def _write(adapter: ModelAdapter, weights: Mapping[str, Tensor], config: TrainConfig, folder: Path) -> str:
    if config.mode == "lora":
        tensors = lora.to_diffusers(weights, config.lora_rank, config.lora_alpha)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / LORA_FILE, {"format": "pt"})
        return LORA_FILE
    adapter.transformer.save_pretrained(str(folder / "transformer"))
    return "transformer"


def _compare(
    fresh: ModelAdapter,
    folder: Path,
    config: TrainConfig,
    shape: tuple[int, ...],
    prompt: str,
    expected: Tensor,
) -> None:
    fresh.transformer.eval()
    base = _probe(fresh, shape, prompt)
    try:
        load_export(fresh, folder)
    except (ValueError, KeyError, RuntimeError) as error:
        raise IntegrityError(f"the export in {folder} cannot be loaded: {str(error)[:300]}") from error
    loaded = _probe(fresh, shape, prompt)
    scale = expected.abs().mean().clamp(min=1e-12)
    off = float((loaded - expected).abs().max() / scale)
    effect = float((expected - base).abs().max() / scale)
    tolerance = 1e-5 if _dtype(fresh.transformer) == torch.float32 else 5e-2
    weak = effect > tolerance and off > effect / 4  # an adapter at the wrong strength
    inert = effect > 0 and torch.equal(loaded, base)
    if weak or inert or not off <= tolerance:
        raise IntegrityError(
            f"the export in {folder} does not give the trained outputs when loaded: "
            f"relative error {off:.1e}, while training changed them by {effect:.1e}",
            hint="the files are kept for inspection; do not use them",
        )


@torch.no_grad()
def _probe(adapter: ModelAdapter, shape: tuple[int, ...], prompt: str) -> Tensor:
    latents = torch.stack([initial_noise(0, row, 0, shape) for row in range(len(PROBE_TIMES))])
    cond = batching.encode(adapter, [prompt] * len(PROBE_TIMES))
    return batching.velocity(adapter, latents, torch.tensor(PROBE_TIMES), cond).float().cpu()


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
