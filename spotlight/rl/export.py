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
from torch import Tensor

from spotlight.config import RunConfig, TrainConfig
from spotlight.errors import IntegrityError
from spotlight.rl import batching, lora, params
from spotlight.rl.models import ModelAdapter, dtype_of, load_model
from spotlight.rl.noise import initial_noise

LORA_FILE = "pytorch_lora_weights.safetensors"
PROBE_TIMES = (1.0, 0.75, 0.5, 0.25)


def export(
    weights: Mapping[str, Tensor],
    config: TrainConfig,
    folder: Path,
    *,
    expected: Tensor,
    shape: tuple[int, ...],
    fresh: Callable[[], ModelAdapter],
    prompt: str = "",
    merged: bool = False,
) -> Path:
    """Write `weights` into `folder`, read them back into a `fresh()` base model, compare its `probe` with `expected`.

    LoRA: `pytorch_lora_weights.safetensors` for `load_lora_weights(folder)`. Full, or LoRA `merged` into the base:
    `transformer/` for `from_pretrained(folder, subfolder="transformer")`, in the base's precision. `shape` is one
    latent's. The folder is replaced only by an export that passed. Returns the path that was written; raises
    IntegrityError.
    """
    staged = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    adapter = fresh()
    adapter.transformer.eval()
    base = probe(adapter, shape, prompt)
    written = _write(adapter, weights, config, staged, merged)
    try:
        load_export(adapter, staged)
    except (ValueError, KeyError, RuntimeError) as error:
        raise IntegrityError(f"the export in {staged} cannot be loaded: {str(error)[:300]}") from error
    _compare(probe(adapter, shape, prompt), base, expected, staged, dtype_of(adapter.transformer))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(staged, folder)
    return folder / written


def export_state(
    state: Mapping[str, Tensor], config: RunConfig, folder: Path, *, live: bool = False, merged: bool = False
) -> Path:
    """Export what a trainer's saved `state` holds: the averaged weights, or the `live` ones. See `export`."""
    kind = "weights/" if live else "average/"
    weights = {name.removeprefix(kind): t for name, t in state.items() if name.startswith(kind)}
    adapter = load_model(config.model)
    params.prepare(adapter, config.train, seed=config.seed)
    params.bind(adapter.transformer, weights)
    shape = adapter.latent_shape(config.model.height, config.model.width)
    expected = probe(adapter, shape)
    del adapter  # one model at a time
    return export(
        weights,
        config.train,
        folder,
        expected=expected,
        shape=shape,
        fresh=lambda: load_model(config.model),
        merged=merged,
    )


def load_export(adapter: ModelAdapter, folder: Path) -> None:
    """Put an export into a freshly loaded adapter, through diffusers' own loaders."""
    transformer = adapter.transformer
    if (folder / LORA_FILE).exists():
        transformer.load_lora_adapter(str(folder), weight_name=LORA_FILE, prefix="transformer")
    else:
        loaded = type(transformer).from_pretrained(str(folder), subfolder="transformer")
        transformer.load_state_dict(loaded.state_dict())


@torch.no_grad()
def probe(adapter: ModelAdapter, shape: tuple[int, ...], prompt: str = "") -> Tensor:
    """What a model answers to a few fixed questions: velocities at `PROBE_TIMES`, fp32 on the CPU."""
    latents = torch.stack([initial_noise(0, row, 0, shape) for row in range(len(PROBE_TIMES))])
    cond = batching.encode(adapter, [prompt] * len(PROBE_TIMES))
    return batching.velocity(adapter, latents, torch.tensor(PROBE_TIMES), cond).float().cpu()


def _write(
    base: ModelAdapter, weights: Mapping[str, Tensor], config: TrainConfig, folder: Path, merged: bool
) -> str:
    if config.mode == "lora" and not merged:
        tensors = lora.to_diffusers(weights, config.lora_rank, config.lora_alpha)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / LORA_FILE, {"format": "pt"})
        return LORA_FILE
    if config.mode == "lora":
        lora.merge(base.transformer, weights, config.lora_rank, config.lora_alpha)
    else:
        base.transformer.load_state_dict(weights, strict=False)  # buffers are not trained
    base.transformer.save_pretrained(str(folder / "transformer"))
    return "transformer"


def _compare(loaded: Tensor, base: Tensor, expected: Tensor, folder: Path, dtype: torch.dtype) -> None:
    scale = expected.abs().mean().clamp(min=1e-12)
    off = float((loaded - expected).abs().max() / scale)
    effect = float((expected - base).abs().max() / scale)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    weak = effect > tolerance and off > effect / 4  # an adapter at the wrong strength
    inert = effect > 0 and torch.equal(loaded, base)
    if weak or inert or not off <= tolerance:
        raise IntegrityError(
            f"the export in {folder} does not give the trained outputs when loaded: "
            f"relative error {off:.1e}, while training changed them by {effect:.1e}",
            hint="the files are kept for inspection; do not use them",
        )
