"""Order-preserving Ulysses attention for diffusers transformers, over any communicator.

Tokens are sharded on the way into the blocks and gathered behind the last projection. Inside attention one
all-to-all turns "my tokens, all heads" into "all tokens, my heads", with the tokens put back in the order a
single process has them, and a second one turns the result back. Lengths, heads and masks may be uneven: every
rank computes all split sizes locally, so no sizes travel. Because each rank then runs the same kernels on the
same rows in the same order, results on CPU equal the single process's bit for bit; on CUDA the choice of GEMM
depends on the number of rows, so promise closeness there.

After Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509).

The seam is `torch.nn.functional.scaled_dot_product_attention`, met through a torch function mode that is on
only while one attention module runs: nothing is patched that another model in the process could see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spotlight.errors import ConfigError
from spotlight.parallel.comm import Comm
from spotlight.parallel.plans import Joint, SPPlan, Stream, plan_for

# A linear layer over 1-3 rows takes another fp32 kernel than one over many rows and differs in the last bit
# (measured on CPU), so no rank works on that few.
MIN_ROWS = 4


def shares(total: int, size: int, at_least: int = 1) -> list[int]:
    """Split `total` over `size` ranks, as evenly as can be; no rank gets 1 to `at_least` - 1 of them.

    Ranks that would get too few get none. A total below `at_least` stays whole on rank 0.
    """
    used = max(1, min(size, total // at_least))
    return [total // used + (i < total % used) if i < used else 0 for i in range(size)]


def _held(owned: Sequence[int]) -> list[int]:
    """Rows that each rank works on. A rank that owns none repeats rank 0's work and sends none of it.

    The models cannot take empty streams, and this keeps their kernels the same as everywhere else.
    """
    return [rows or owned[0] for rows in owned]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out_rows: Sequence[int], in_rows: Sequence[int], comm: Comm) -> Tensor:
        ctx.route = (in_rows, out_rows, comm)
        return comm.all_to_all(x, out_rows, in_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out_rows, in_rows, comm = ctx.route
        return comm.all_to_all(grad, out_rows, in_rows), None, None, None


class _AllGather(torch.autograd.Function):
    """Each rank's loss sees the whole output, so its gradient for the own rows is a slice, not a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Sequence[int], comm: Comm) -> Tensor:
        start = sum(rows[: comm.rank])
        ctx.own = slice(start, start + rows[comm.rank])
        return comm.all_gather(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.own], None, None


class Sharding:
    """Ulysses installed in one model; which group it works over may change between any two forwards.

    Unbound (or bound to a group of one) the model runs exactly as if nothing were installed. All ranks of a
    group call the model with equal arguments and all get the full output. With gradient checkpointing,
    run backward before the next forward of other lengths: recomputation uses the latest lengths.
    """

    def __init__(self, model: nn.Module, plan: SPPlan) -> None:
        self.comm: Comm | None = None
        self._lengths: dict[Stream, int] = {}
        self._undo: list[Callable[[], None]] = []
        self._heads: set[int] = set()
        self._install(model, plan)

    def bind(self, comm: Comm | None) -> None:
        """Work over `comm` from the next forward on. Raises ConfigError if it has more ranks than heads."""
        if comm is not None and comm.size > min(self._heads):
            raise ConfigError(f"sp_degree {comm.size} exceeds the {min(self._heads)} attention heads")
        self.comm = comm if comm is not None and comm.size > 1 else None

    def remove(self) -> None:
        """Take every hook out; the model is as before `install`."""
        while self._undo:
            self._undo.pop()()

    def _install(self, model: nn.Module, plan: SPPlan) -> None:
        blocks = list(model.get_submodule(plan.blocks).children())
        self._on_call(model, self._note_text_length)
        for path, outputs in plan.outputs.items():
            self._on_output(model.get_submodule(path), self._shard_outputs(outputs))
        for block in blocks if plan.every_block else []:
            self._on_call(block, self._shard_inputs(plan.every_block, remember=False))
        self._on_call(blocks[0], self._shard_inputs(plan.inputs, remember=True))
        for path, kinds in plan.attention.items():
            for block in model.get_submodule(path).children():
                for name, joint in kinds.items():
                    if getattr(block, name, None) is not None:
                        self._wrap_attention(getattr(block, name), joint)
        self._on_output(model.get_submodule(plan.gather), self._gather)

    def _on_call(self, module: nn.Module, change: Callable[[_Arguments], None]) -> None:
        names = list(inspect.signature(module.forward).parameters)

        def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
            if self.comm is None:
                return None
            arguments = _Arguments(names, args, kwargs)
            change(arguments)
            return tuple(arguments.args), arguments.kwargs

        self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _on_output(self, module: nn.Module, change: Callable[[Any], Any]) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            return None if self.comm is None else change(output)

        self._undo.append(module.register_forward_hook(hook).remove)

    def _wrap_attention(self, module: nn.Module, joint: Joint) -> None:
        inner, before = module.forward, module.__dict__.get("forward")
        self._heads.add(module.heads)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.comm is None:
                return inner(*args, **kwargs)
            with _SplitHeads(self.comm, [self._lengths[stream] for stream in joint], joint) as mode:
                output = inner(*args, **kwargs)
            if mode.calls != 1:
                raise ConfigError(
                    f"{type(module).__name__} made {mode.calls} scaled_dot_product_attention calls, not 1",
                    hint="sequence parallelism needs diffusers' native attention backend and no IP adapter",
                )
            return output

        def undo() -> None:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before

        module.__dict__["forward"] = forward
        self._undo.append(undo)

    # What the hooks do. `self.comm` is a group of at least two here.

    def _note_text_length(self, arguments: _Arguments) -> None:
        self._lengths = {"text": arguments["encoder_hidden_states"].shape[1]}

    def _shard_inputs(self, streams: Mapping[str, Stream], remember: bool) -> Callable[[_Arguments], None]:
        def change(arguments: _Arguments) -> None:
            for name, stream in streams.items():
                value = arguments[name]
                if value is None:
                    continue
                if remember:
                    self._lengths[stream] = value.shape[1]
                arguments[name] = self._shard(value, 1)

        return change

    def _shard_outputs(self, outputs: Sequence[Joint]) -> Callable[[Any], Any]:
        def change(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(self._shard_joint(t, joint) for t, joint in zip(tensors, outputs, strict=True))

        return change

    def _shard_joint(self, x: Tensor, joint: Joint) -> Tensor:
        """Shard a table whose rows belong to the streams of `joint`, in that order."""
        text = self._lengths["text"] if "text" in joint else 0
        rows = {"text": text, "image": x.shape[0] - text}
        return torch.cat([self._shard(part, 0) for part in x.split([rows[stream] for stream in joint])])

    def _shard(self, x: Tensor, dim: int) -> Tensor:
        assert self.comm is not None
        owned = shares(x.shape[dim], self.comm.size, MIN_ROWS)
        return x.split(owned, dim)[self.comm.rank if owned[self.comm.rank] else 0]

    def _gather(self, x: Tensor) -> Tensor:
        """(B, held rows, C) -> (B, all rows, C)."""
        assert self.comm is not None
        owned = shares(self._lengths["image"], self.comm.size, MIN_ROWS)
        rows = x[:, : owned[self.comm.rank]].transpose(0, 1)
        return _AllGather.apply(rows, owned, self.comm).transpose(0, 1).contiguous()


def install(model: nn.Module, plan: SPPlan | None = None) -> Sharding:
    """Make a transformer ready for sequence parallelism. Raises ConfigError if its class has no plan."""
    return Sharding(model, plan or plan_for(model))


class _Arguments:
    """The arguments of a call by name, wherever they were put: checkpointing passes them by position."""

    def __init__(self, names: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = list(args), dict(kwargs)
        self._index = {name: i for i, name in enumerate(names[: len(args)])}

    def __getitem__(self, name: str) -> Any:
        return self.args[self._index[name]] if name in self._index else self.kwargs.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._index:
            self.args[self._index[name]] = value
        else:
            self.kwargs[name] = value


class _SplitHeads(TorchFunctionMode):
    """While on, scaled_dot_product_attention takes sharded tokens and works on all tokens of some heads."""

    def __init__(self, comm: Comm, lengths: Sequence[int], joint: Joint) -> None:
        super().__init__()
        self.calls = 0
        self._comm, self._joint, self._lengths = comm, joint, list(lengths)
        self._owned = [shares(n, comm.size, MIN_ROWS) for n in lengths]  # [stream][rank] -> rows
        self._held = [_held(by_rank) for by_rank in self._owned]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """(B, H, held rows, D) each -> (B, H, held rows, D)."""
        held = _by_rank(self._held)[self._comm.rank]
        if not query.shape[1:3] == key.shape[1:3] == value.shape[1:3] or query.shape[2] != held:
            raise ConfigError(
                f"attention over {query.shape[2]} tokens where this rank holds {held}",
                hint="extra tokens (IP adapters, skipped first blocks) do not work with sp_degree > 1",
            )
        heads = shares(query.shape[1], self._comm.size)
        mask = None if attn_mask is None else self._whole_mask(attn_mask)
        q, k, v = self._all_tokens(torch.cat([query, key, value], dim=-1), heads).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        return self._all_heads(out, heads)

    def _all_tokens(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        """(B, H, held rows, C) -> (B, own heads, all rows, C), rows in single-process order."""
        batch, width, me = x.shape[0], x.shape[3], self._comm.rank
        streams = x.split([by_rank[me] for by_rank in self._held], dim=2)
        owned = [part[:, :, : by_rank[me]] for part, by_rank in zip(streams, self._owned, strict=True)]
        # Heads outermost, so that what goes to one rank is consecutive.
        flat = torch.cat(owned, dim=2).transpose(0, 1).reshape(-1, width)
        rows = _by_rank(self._owned)
        out_rows = [heads[me] * batch * n for n in rows]
        received = _AllToAll.apply(flat, out_rows, [h * batch * rows[me] for h in heads], self._comm)
        parts = []
        for rank, part in enumerate(received.split(out_rows)):
            whole = part.view(heads[me], batch, rows[rank], width)
            parts.append(whole.split([by_rank[rank] for by_rank in self._owned], dim=2))
        ordered = [part for stream in zip(*parts, strict=True) for part in stream]
        return torch.cat(ordered, dim=2).transpose(0, 1)

    def _all_heads(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        """(B, own heads, all rows, D) -> (B, H, held rows, D)."""
        batch, mine, _, width = x.shape
        pieces = []  # [stream][rank]
        for stream, owned in zip(x.split(self._lengths, dim=2), self._owned, strict=True):
            parts = stream.split(owned, dim=2)
            pieces.append([part if n else parts[0] for part, n in zip(parts, owned, strict=True)])
        to_ranks = [torch.cat(p, dim=2).transpose(0, 1).reshape(-1, width) for p in zip(*pieces, strict=True)]
        rows = _by_rank(self._held)
        held = rows[self._comm.rank]
        in_rows = [mine * batch * n for n in rows]
        received = _AllToAll.apply(
            torch.cat(to_ranks), [h * batch * held for h in heads], in_rows, self._comm
        )
        return received.view(sum(heads), batch, held, width).transpose(0, 1)

    def _whole_mask(self, mask: Tensor) -> Tensor:
        """The mask over all tokens, from (B, 1, 1, rows) that covers all text and all or the held image rows.

        Text comes whole since nothing shards it; the model adds ones for the image rows it sees. Image
        tokens are never masked, so the missing ones are ones.
        """
        total = sum(self._lengths)
        held = self._held[-1][self._comm.rank]
        known = self._joint == ("text", "image") and mask.shape[-1] == self._lengths[0] + held
        if mask.shape[1] != 1 or not (known or mask.shape[-1] == total):
            raise ConfigError(f"attention mask of shape {tuple(mask.shape)} does not cover {total} tokens")
        if mask.shape[-1] == total:
            return mask
        return F.pad(mask, (0, total - mask.shape[-1]), value=True if mask.dtype == torch.bool else 0.0)


def _by_rank(rows: Sequence[Sequence[int]]) -> list[int]:
    """[stream][rank] -> rows of each rank over all streams."""
    return [sum(streams) for streams in zip(*rows, strict=True)]
