"""Training over 1, 2 and 4 real processes on gloo gives the same figures, weights and checkpoints."""

from __future__ import annotations

import json
import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.random_sd3 import RandomSD3
from fakes.rl_runs import make_config, roll_out
from safetensors.torch import load_file, save_file

from spotlight.parallel import comm, ulysses
from spotlight.rl import batching, distributed, params
from spotlight.rl.train_step import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Sums over processes round differently: measured, the weights differ by up to 2e-7 after three steps.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-6, 2e-6
LR = 1e-4


def config_of(kind: str, mode: str, micro_batch: int = 3, **sampler: Any):
    return make_config(
        algorithm={"kind": kind, "kl": 1e-3},
        sampler={"steps": 3, "kind": "ode" if kind in ("nft", "awm") else "sde", **sampler},
        train={"mode": mode, "lora_rank": 4, "updates": 3, "micro_batch": micro_batch, "lr": LR},
    )


def batch_of(config, samples: int):
    """Rewarded samples of the untrained model; `samples` of them are left."""
    return roll_out(Trainer(RandomSD3(), config), groups=2, size=(samples + 1) // 2)[:samples]


def spawn(world: int, work, folder: Path, *args) -> None:
    """work(rank, folder, *args) in `world` forked processes of one group; all must succeed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")  # torch and diffusers are already imported
    ranks = [
        context.Process(target=_rank, args=(rank, world, port, work, folder, *args)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world


def _rank(rank: int, world: int, port: int, work, folder: Path, *args) -> None:
    torch.set_num_threads(1)
    distributed.join(rank, world, "127.0.0.1", port, timeout_s=60)
    work(rank, folder, *args)
    dist.destroy_process_group()


def train(rank: int, folder: Path, config, batch, sp_degree: int = 1, checkpointing: bool = False) -> None:
    """One iteration from the start; rank 0 leaves metrics, published and averaged weights, and the state."""
    adapter = RandomSD3()
    if checkpointing:
        adapter.transformer.enable_gradient_checkpointing()
    if sp_degree > 1:
        group, place = divmod(rank, sp_degree)
        store = dist.distributed_c10d._get_default_store()
        ulysses.install(adapter.transformer).bind(_sp_group(store, group, place, sp_degree))
    trainer = distributed.DistributedTrainer(adapter, config, sp_degree=sp_degree)
    metrics = trainer.train(batch, 0)
    published, average = trainer.trainable(), trainer.ema_tensors()
    tensors, meta = trainer.state()
    assert [bool(found) for found in (published, average, tensors)] == [rank == 0] * 3
    if sp_degree == 1:
        roll_out_alone(rank, folder, trainer, batch)
    if rank == 0:
        save_file(published, folder / "published.safetensors")
        save_file(average, folder / "average.safetensors")
        save_file(tensors, folder / "state.safetensors")
        (folder / "result.json").write_text(json.dumps({"metrics": metrics, "meta": meta}))


def roll_out_alone(rank: int, folder: Path, trainer: Trainer, batch) -> None:
    """Every process has the whole policy while it rolls out, and a forward needs none of the others."""
    transformer = trainer.adapter.transformer
    with trainer.rolling_out(), torch.no_grad():
        live = {n: p.detach().clone() for n, p in params.trainable_parameters(transformer).items()}
        save_file(live, folder / f"policy-{rank}.safetensors")
        if rank == 0:
            latents = torch.stack([sample.latents for sample in batch])
            cond = batching.encode(trainer.adapter, [sample.prompt for sample in batch])
            v = batching.velocity(trainer.adapter, latents, torch.full((len(batch),), 0.5), cond)
            assert v.isfinite().all()
    live_again = params.trainable_parameters(transformer)
    assert all(
        params.whole(live_again[n].detach()).equal(params.whole(t.detach()))
        for n, t in trainer.parameters.items()
    )


def _sp_group(store, group: int, rank: int, size: int):
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set(f"sp/{group}", str(server.port))
        _sp_group.server = server  # lives as long as the process
    port = int(store.get(f"sp/{group}"))
    return comm.form(("127.0.0.1", port), f"sp/{group}", rank, size)


def one_process(config, batch) -> tuple[Trainer, dict[str, float]]:
    trainer = Trainer(RandomSD3(), config)
    return trainer, trainer.train(batch, 0)


def check_same(folder: Path, config, batch) -> None:
    alone, metrics = one_process(config, batch)
    found = json.loads((folder / "result.json").read_text())["metrics"]
    assert found.keys() == metrics.keys()
    for name, value in metrics.items():
        assert found[name] == pytest.approx(value, abs=LOSS_TOLERANCE, rel=1e-4), name
    exact = load_file(folder / "published.safetensors")
    for policy in sorted(folder.glob("policy-*.safetensors")):
        published = load_file(policy)
        assert published.keys() == alone.trainable().keys() == exact.keys()
        assert all(published[name].equal(tensor) for name, tensor in exact.items())
        for name, tensor in alone.trainable().items():
            torch.testing.assert_close(published[name], tensor, atol=WEIGHT_TOLERANCE, rtol=0)
    for name, tensor in alone.ema_tensors().items():
        average = load_file(folder / "average.safetensors")[name]
        torch.testing.assert_close(average, tensor, atol=WEIGHT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("kind", ["flow_grpo", "nft"])
def test_any_world_size_gives_the_same_loss_and_weights(kind: str, mode: str, tmp_path: Path):
    config = config_of(kind, mode)
    batch = batch_of(config, 7)  # not divisible by 2 or 4: shares differ
    start = Trainer(RandomSD3(), config).trainable()
    trained = one_process(config, batch)[0]
    assert any((trained.parameters[n] - t).abs().max() > LR for n, t in start.items())  # it moves by far more
    for world in (1, 2, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        spawn(world, train, folder, config, batch)
        check_same(folder, config, batch)


def test_fewer_points_than_processes(tmp_path: Path):
    config = config_of("nft", "full", micro_batch=1)
    batch = batch_of(config, 2)
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"steps_trained": 1})})
    spawn(4, train, tmp_path, config, batch)
    check_same(tmp_path, config, batch)


def test_guidance_in_training(tmp_path: Path):
    config = config_of("flow_grpo", "lora", cfg=2.0)
    with_guidance = batch_of(config, 4)
    spawn(2, train, tmp_path, config, with_guidance)
    check_same(tmp_path, config, with_guidance)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_gradient_checkpointing_changes_nothing(mode: str, tmp_path: Path):
    config = config_of("flow_grpo", mode)
    batch = batch_of(config, 4)
    spawn(2, train, tmp_path, config, batch, 1, True)
    check_same(tmp_path, config, batch)


@pytest.mark.parametrize(("mode", "world", "degree"), [("lora", 2, 2), ("full", 4, 2)])
def test_sequence_parallel_training(mode: str, world: int, degree: int, tmp_path: Path):
    config = config_of("flow_grpo", mode)
    batch = batch_of(config, 5)
    spawn(world, train, tmp_path, config, batch, degree)
    check_same(tmp_path, config, batch)


def resume(rank: int, folder: Path, config, batch, saved: Path) -> None:
    """Load a state and train one more iteration."""
    trainer = distributed.DistributedTrainer(RandomSD3(), config)
    trainer.load_state(
        load_file(saved / "state.safetensors"), json.loads((saved / "result.json").read_text())["meta"]
    )
    tensors, _ = trainer.state()
    if rank == 0:
        save_file(tensors, folder / "loaded.safetensors")
    metrics = trainer.train(batch, 1)
    published = trainer.trainable()
    if rank == 0:
        save_file(published, folder / "published.safetensors")
        (folder / "metrics.json").write_text(json.dumps(metrics))


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_checkpoint_of_two_loads_in_one_and_four(mode: str, tmp_path: Path):
    config = config_of("nft", mode)
    batch = batch_of(config, 6)
    saved = tmp_path / "saved"
    saved.mkdir()
    spawn(2, train, saved, config, batch)
    whole = load_file(saved / "state.safetensors")
    alone = Trainer(RandomSD3(), config)
    alone.load_state(whole, json.loads((saved / "result.json").read_text())["meta"])
    metrics = alone.train(batch, 1)
    for world in (1, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        spawn(world, resume, folder, config, batch, saved)
        loaded = load_file(folder / "loaded.safetensors")
        assert loaded.keys() == whole.keys()
        assert all(torch.equal(loaded[name], whole[name]) for name in whole)
        found = json.loads((folder / "metrics.json").read_text())
        assert found["loss"] == pytest.approx(metrics["loss"], abs=LOSS_TOLERANCE)
        for name, tensor in load_file(folder / "published.safetensors").items():
            torch.testing.assert_close(tensor, alone.trainable()[name], atol=WEIGHT_TOLERANCE, rtol=0)
