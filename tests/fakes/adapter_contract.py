"""What every adapter of a diffusers pipeline must show, as plain functions over (adapter, pipeline)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from fakes import tiny_pipelines
from fakes.rl_runs import export_of
from torch import Tensor
from torch.distributed import TCPStore

from spotlight.config import ModelConfig, check
from spotlight.parallel import comm, ulysses
from spotlight.rl import batching, params
from spotlight.rl.batch import TrainSample
from spotlight.rl.denoise import DenoiseState, begin, denoise
from spotlight.rl.models import DTYPES, ModelAdapter, load_model
from spotlight.rl.models.pipeline import pack
from spotlight.rl.sampler import Sampler, rollout_sampler, shifted_sigmas
from spotlight.rl.train_step import Trainer

PROMPTS = ["a cat", 'a Dog that says "hi"']  # of different lengths
SIZES = [
    (64, 64),
    (160, 160),
    (48, 80),
    (16, 112),
]  # square, large, an odd number of tokens each way, a strip
TOKENS = 160  # longer than Qwen's template, one token a byte

# The algorithm's demands on the sampler, and the loss.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "flow_grpo": {"sampler": {"kind": "sde"}, "algorithm": {"kind": "flow_grpo", "kl": 0.04}},
    "grpo_guard": {"sampler": {"kind": "cps"}, "algorithm": {"kind": "grpo_guard"}},
    "nft": {"sampler": {"kind": "ode"}, "algorithm": {"kind": "nft", "kl": 1e-4, "nft_beta": 0.1}},
    "awm": {"sampler": {"kind": "ode"}, "algorithm": {"kind": "awm"}},
}
SMALL = (32, 48)


def load(folder: Path, **config: Any) -> ModelAdapter:
    """The adapter whose name the folder has."""
    return load_model(ModelConfig(kind=folder.name, path=str(folder), **{"text_tokens": TOKENS, **config}))


def draw(
    adapter: ModelAdapter, size: tuple[int, int], cfg: float, prompts: list[str], rows: list[int]
) -> tuple[Tensor, Sampler, Tensor]:
    """Images by our own ODE sampler, the sampler, and the latents that it began with."""
    sampler = Sampler("ode", shifted_sigmas(3, 1.7), cfg=cfg)
    shape = adapter.latent_shape(*size)
    states = [begin(row, 1, version=0, sampler=sampler, run_seed=0, shape=shape) for row in rows]
    negative = batching.encode(adapter, [""] * len(rows)) if cfg != 1 else None
    done = denoise(adapter, sampler, batching.encode(adapter, prompts), states, run_seed=0, negative=negative)
    images = batching.decode(adapter, torch.stack([state.latents for state in done]))
    return images, sampler, torch.stack([state.latents for state in states])


def draw_with_diffusers(
    pipe: DiffusionPipeline,
    kind: str,
    size: tuple[int, int],
    sampler: Sampler,
    latents: Tensor,
    output_type: str = "pt",
) -> Tensor:
    """The pipeline's own images from the same latents, prompts and sigmas."""
    cfg = sampler.cfg
    call: dict[str, Any] = {
        "prompt": PROMPTS,
        "height": size[0],
        "width": size[1],
        "sigmas": list(sampler.sigmas[:-1]),
        "num_inference_steps": sampler.steps,
        "max_sequence_length": TOKENS,
        "output_type": output_type,
    }
    if kind == "sd3":
        call |= {"latents": latents, "guidance_scale": cfg}
    else:
        empty = " " if kind == "qwen_image" else ""
        call |= {"latents": pack(latents), "true_cfg_scale": cfg}
        call |= {"negative_prompt": [empty] * 2} if cfg != 1 else {}
        call |= {"guidance_scale": 3.5} if kind == "flux" else {}
    return pipe(**call).images


def check_images(folder: Path, pipe: DiffusionPipeline, size: tuple[int, int], cfg: float) -> None:
    """Adapter and pipeline draw the same."""
    images, sampler, latents = draw(load(folder), size, cfg, PROMPTS, [0, 1])
    theirs = draw_with_diffusers(pipe, folder.name, size, sampler, latents)
    assert images.shape == (2, 3, *size)
    torch.testing.assert_close(images, theirs, atol=2e-5, rtol=0)
    assert theirs.std() > 0.05  # nor are they constant


def check_guidance_matters(folder: Path) -> None:
    """Prompts and guidance change the image: the comparison above is not between constants."""
    adapter = load(folder)
    plain, _, _ = draw(adapter, SMALL, 1.0, PROMPTS, [0, 0])
    guided, _, _ = draw(adapter, SMALL, 3.0, PROMPTS, [0, 0])
    assert (plain[0] - plain[1]).abs().max() > 1e-3
    assert (plain - guided).abs().max() > 1e-3


def check_batch_does_not_matter(folder: Path) -> None:
    """A sample is the same alone, and beside one whose prompt is longer."""
    adapter = load(folder)
    together, _, _ = draw(adapter, SMALL, 3.0, PROMPTS, [0, 1])
    alone, _, _ = draw(adapter, SMALL, 3.0, PROMPTS[:1], [0])
    torch.testing.assert_close(together[:1], alone, atol=2e-5, rtol=0)


def check_training_step(folder: Path, algorithm: str, mode: str, cfg: float = 1.0) -> None:
    """One iteration: ratio 1 at the first update, finite figures, changed weights."""
    config = check(
        {
            "sampler": {"steps": 3, "cfg": cfg, "noise_level": 0.7, **ALGORITHMS[algorithm]["sampler"]},
            "algorithm": ALGORITHMS[algorithm]["algorithm"],
            "train": {"mode": mode, "lora_rank": 4, "lora_alpha": 8, "lr": 1e-3, "updates": 2},
        }
    )
    trainer = Trainer(load(folder, gradient_checkpointing=True), config)
    before = trainer.trainable()
    start = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    batch = [
        TrainSample.of(state, PROMPTS[state.row], float(state.latents.mean()))
        for state in roll_out(trainer, keep=trainer.algorithm.needs_trajectory)
    ]
    metrics = trainer.train(batch, 0)
    assert metrics["updates"] == 2
    assert metrics["skipped_steps"] == 0
    assert metrics["grad_norm"] > 0
    assert metrics.get("ratio_dev", 0.0) <= config.train.ratio_tolerance
    # The last block's text side ends nowhere in some models: no gradient, no move.
    reached = {name for name, p in trainer.parameters.items() if p.grad is not None and p.grad.any()}
    assert {name for name, p in trainer.parameters.items() if not torch.equal(p, start[name])} == reached
    assert len(reached) >= 0.7 * len(start)
    assert before.keys() == trainer.ema_tensors().keys()


def roll_out(trainer: Trainer, *, keep: bool) -> list[DenoiseState]:
    """Two samples of each prompt with the published weights."""
    adapter, sampler = trainer.adapter, rollout_sampler(trainer.config.sampler)
    ids = [(row, seed) for row in range(len(PROMPTS)) for seed in range(2)]
    shape = adapter.latent_shape(*SMALL)
    states = [begin(row, seed, version=0, sampler=sampler, run_seed=0, shape=shape) for row, seed in ids]
    negative = batching.encode(adapter, [""] * len(ids)) if sampler.cfg != 1 else None
    with params.bound(adapter.transformer, trainer.trainable()):
        cond = batching.encode(adapter, [PROMPTS[row] for row, _ in ids])
        return denoise(adapter, sampler, cond, states, run_seed=0, keep_trajectory=keep, negative=negative)


def check_lora_export(folder: Path, pipe: DiffusionPipeline, where: Path) -> None:
    """The export draws what the trained adapter draws, and not what the base draws, as LoRA and merged."""
    adapter = load(folder)
    config = check({"train": {"mode": "lora", "lora_rank": 4, "lora_alpha": 8}}).train
    base, sampler, latents = draw(adapter, SMALL, 3.0, PROMPTS, [0, 1])
    params.prepare(adapter, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in params.snapshot(adapter.transformer).items()
    }
    shape = adapter.latent_shape(*SMALL)
    path = export_of(adapter, weights, config, where, shape=shape, fresh=lambda: load(folder), prompt="a")
    with params.bound(adapter.transformer, weights):
        trained, _, _ = draw(adapter, SMALL, 3.0, PROMPTS, [0, 1])
    pipe.load_lora_weights(str(path.parent), weight_name=path.name)
    theirs = draw_with_diffusers(pipe, folder.name, SMALL, sampler, latents)
    torch.testing.assert_close(trained, theirs, atol=5e-5, rtol=0)
    assert (trained - base).abs().max() > 1e-2
    pipe.unload_lora_weights()
    whole = {"shape": shape, "fresh": lambda: load(folder), "prompt": "a", "merged": True}
    merged = export_of(adapter, weights, config, where.with_name("merged"), **whole)
    pipe.transformer = type(adapter.transformer).from_pretrained(str(merged))
    theirs = draw_with_diffusers(pipe, folder.name, SMALL, sampler, latents)
    torch.testing.assert_close(trained, theirs, atol=5e-5, rtol=0)


def check_sequence_parallel(folder: Path, degree: int, size: tuple[int, int]) -> None:
    """Over `degree` ranks the velocity is the single process's."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    adapters = [load(folder) for _ in range(degree)]
    cond = batching.encode(adapters[0], PROMPTS * 2)
    latents = torch.randn(4, *adapters[0].latent_shape(*size), generator=torch.Generator().manual_seed(3))
    t = torch.tensor([0.9, 0.6, 0.5, 0.2])
    with torch.no_grad():
        alone = adapters[0].velocity(latents, t, cond)
    found: dict[int, Tensor] = {}
    groups: list[comm.Comm] = []

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        group = comm.form(("127.0.0.1", store.port), "contract", rank, degree)
        groups.append(group)
        ulysses.install(adapters[rank].transformer).bind(group)
        with torch.no_grad():
            found[rank] = adapters[rank].velocity(latents, t, cond)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for group in groups:
        group.close()
    assert sorted(found) == list(range(degree))
    for velocity in found.values():
        torch.testing.assert_close(velocity, alone, atol=1e-5, rtol=1e-5)


def check_precision(folder: Path, pipe: DiffusionPipeline, dtype: str) -> None:
    """A half-precision model takes and gives fp32, and one Euler step is the half-precision pipeline's.

    (Not the fp32 model's: diffusers computes 1000 t and Flux's guidance in half precision, and their sines
    with random weights behind them turn the last bit into tens of per cent.)
    """
    adapter = load(folder, dtype=dtype)
    precision = DTYPES[dtype]
    latents = torch.randn(2, *adapter.latent_shape(*SMALL), generator=torch.Generator().manual_seed(3))
    latents = latents.to(precision).float()
    with torch.no_grad():
        v = adapter.velocity(latents, torch.ones(2), adapter.encode(PROMPTS))
    assert v.dtype == torch.float32
    sampler = Sampler("ode", (1.0, 0.0))
    pipe.to(dtype=precision)
    theirs = draw_with_diffusers(
        pipe, folder.name, SMALL, sampler, latents.to(precision), output_type="latent"
    ).float()
    ours = latents - v if folder.name == "sd3" else pack(latents - v)
    epsilon = torch.finfo(precision).eps
    torch.testing.assert_close(ours, theirs, atol=4 * epsilon, rtol=epsilon)


def save(kind: str, folder: Path, **transformer: Any) -> Path:
    """A checkpoint in a folder that has the adapter's name."""
    return tiny_pipelines.save(kind, folder / kind, **transformer)
