"""Training over several processes, one per GPU, with the same loss and weights as one process to rounding.

LoRA: every process holds the model, and torch's DistributedDataParallel averages the adapter's gradients. Full
fine-tuning: torch's FSDP2 shards parameters, gradients and optimiser state. All processes are given the same
batch and take their own share of each update's training points; checkpoints hold whole tensors, so one saved
by two processes loads in one or four.

With sequence parallelism `sp_degree` neighbouring processes form a group that works on the same points, each
on its part of the tokens; their gradients are parts of a sum.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from spotlight.config import RunConfig
from spotlight.errors import ConfigError
from spotlight.rl import batching
from spotlight.rl.algorithms import RATIO_DEVIATION, Points
from spotlight.rl.batch import PointRef, TrainSample
from spotlight.rl.models import Conditioning, ModelAdapter
from spotlight.rl.sampler import Sampler
from spotlight.rl.train_step import Tally, Trainer

Triple = tuple[Points, Conditioning, Conditioning | None]


def host(address: str) -> dist.TCPStore:
    """Where a group meets: rank 0 opens it and tells the others its `port`, which the system chose."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)


def join(
    rank: int,
    world: int,
    address: str,
    port: int,
    *,
    meeting: dist.Store | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Make this process one of `world`; NCCL with a GPU, gloo without.

    They meet at `address`:`port`, where rank 0 listens: `meeting` is what it opened with `host`, if it did. Every
    process works on its current GPU. A collective that somebody does not come to fails after `timeout_s`.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if ipaddress.ip_address(address).is_loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # not whatever the machine's own name resolves to
    store = meeting or dist.TCPStore(
        address, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout
    )
    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    dist.init_process_group(
        "nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=timeout, device_id=gpu
    )


def make_trainer(adapter: ModelAdapter, config: RunConfig) -> Trainer:
    """The trainer of this process: one of a group if it has joined one, else all there is."""
    return (DistributedTrainer if dist.is_initialized() else Trainer)(adapter, config)


class DistributedTrainer(Trainer):
    """See `Trainer`. Call it in every process of the default group with equal arguments.

    `trainable`, `ema_tensors` and `state` are collective too, and return tensors on rank 0 alone; so are
    `rolling_out` and `averaged` as they are entered, but what is done inside is each process's own business. Raises
    ConfigError if the processes do not make up whole sequence-parallel groups.
    """

    def __init__(
        self, adapter: ModelAdapter, config: RunConfig, *, sampler: Sampler | None = None, sp_degree: int = 1
    ) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        if self._world % sp_degree:
            raise ConfigError(f"{self._world} training processes do not make up groups of {sp_degree}")
        self._groups = self._world // sp_degree
        self._group = self._rank // sp_degree
        self._real = 0  # points of the current micro-batch that count
        self._fillers = 0  # points of the iteration that do not
        super().__init__(adapter, config, sampler=sampler)
        self._replica = None if self._sharded else _replicate(adapter, self.sampler.cfg)

    @property
    def _keeps(self) -> bool:
        return self._rank == 0

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """All of the model in this process. Gathered once: no forward in between needs the others."""
        root = self.adapter.transformer
        if not isinstance(root, FSDPModule):
            yield
            return
        sharded = [module for module in root.modules() if isinstance(module, FSDPModule)]
        root.set_reshard_after_forward(False)
        for module in sharded:
            module.unshard()
        try:
            yield
        finally:
            root.set_reshard_after_forward(True)
            for module in sharded:
                module.reshard()

    @property
    def _sharded(self) -> bool:
        return isinstance(self.adapter.transformer, FSDPModule)

    def _prepare(self) -> None:
        super()._prepare()
        if self.config.train.mode == "full":
            _shard(self.adapter.transformer)

    def _points(
        self,
        batch: Sequence[TrainSample],
        refs: Sequence[PointRef],
        iteration: int,
        cond: Conditioning,
        negative: Conditioning | None,
    ) -> Iterator[Triple]:
        """Micro-batches of this process's share: as many as everybody has, gradients exchanged in the last.

        A share that is one short is filled up with a point that counts for nothing: every process must make
        the same calls.
        """
        size, most = self.config.train.micro_batch, -(-len(refs) // self._groups)
        own = list(refs[self._group :: self._groups])
        real = len(own)
        own += refs[: most - real]
        count = -(-most // size)
        bounds = [round(part * most / count) for part in range(count + 1)]
        for number, (start, stop) in enumerate(pairwise(bounds), 1):
            self._real = min(stop, real) - start
            self._exchange_gradients(number == count)
            yield from super()._points(batch, own[start:stop], iteration, cond, negative)

    def _update(self, micro: Iterator[Triple], total: float, tally: Tally, *, check_ratio: bool) -> None:
        # Both wrappers average over all processes; wanted is the sum over all points / their number.
        super()._update(micro, total / self._world, tally, check_ratio=check_ratio)

    def _loss(
        self, points: Points, cond: Conditioning, negative: Conditioning | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super()._loss(points, cond, negative)
        counts = torch.arange(len(loss), device=loss.device) < self._real
        self._fillers += len(loss) - self._real
        return loss * counts, {name: values * counts for name, values in metrics.items()}

    def _velocity(self, points: Points, cond: Conditioning, negative: Conditioning | None) -> Tensor:
        if self._replica is None or not torch.is_grad_enabled():
            return super()._velocity(points, cond, negative)
        return self._replica(points.x, points.t, cond, negative)

    def _exchange_gradients(self, now: bool) -> None:
        if self._replica is not None:
            self._replica.require_backward_grad_sync = now
        else:
            self.adapter.transformer.set_requires_gradient_sync(now)

    def _check_ratio(self, metrics: Mapping[str, Tensor]) -> float:
        worst = metrics[RATIO_DEVIATION].max().detach().clone()
        dist.all_reduce(worst, dist.ReduceOp.MAX)  # all stop or none does
        return super()._check_ratio({RATIO_DEVIATION: worst})

    def _merged(self, tally: Tally) -> Tally:
        if not tally.points:
            return tally
        names = sorted(tally.sums)
        where = batching.device_of(self.adapter)
        points, self._fillers = tally.points - self._fillers, 0
        sums = torch.tensor([points, *(tally.sums[n] for n in names)], dtype=torch.float64, device=where)
        dist.all_reduce(sums)
        peak = torch.tensor(tally.ratio_dev, device=where)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        total, *values = sums.tolist()
        tally.points, tally.sums = int(total), dict(zip(names, values, strict=True))
        tally.ratio_dev = float(peak)
        return tally


class _Policy(nn.Module):
    """The adapter's velocity as a module's forward, which is where DistributedDataParallel comes in."""

    def __init__(self, adapter: ModelAdapter, cfg: float) -> None:
        super().__init__()
        self.transformer = adapter.transformer
        self._ask = lambda *args: batching.velocity(adapter, *args[:3], negative=args[3], cfg=cfg)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning, negative: Conditioning | None) -> Tensor:
        """See `ModelAdapter.velocity`."""
        return self._ask(x, t, cond, negative)


def _replicate(adapter: ModelAdapter, cfg: float) -> DistributedDataParallel:
    # The last block's text side ends nowhere in some models, so its adapters get no gradient.
    return DistributedDataParallel(
        _Policy(adapter, cfg), find_unused_parameters=True, broadcast_buffers=False
    )


def _shard(transformer: nn.Module) -> None:
    """FSDP2, block by block.

    Everything is resharded after each forward, the root too: its gathered parameters would otherwise
    outlive a change of weights (`params.bound`) and serve the next forward.
    """
    for module in transformer.modules():
        if type(module).__name__ in transformer._no_split_modules:
            fully_shard(module, reshard_after_forward=True)
    fully_shard(transformer, reshard_after_forward=True)
