"""Communicators: what a sequence-parallel group needs of a network, over gloo and over NCCL.

A communicator is an object of its own. It needs no default process group, any processes that reach one
store can form one, several can exist at once, and dropping one leaves the others alone. So when a peer is
lost the survivors keep process and weights and form the next communicator under the next epoch's name.

Leaving a broken group is the hard part. gloo's own `abort()` does nothing, and a frozen peer would hold the
others until the timeout; shutting down the group's connected sockets frees them at once. NCCL is made
non-blocking and aborted, and nobody waits for a stream without watching the abort flag.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from spotlight.errors import CommError


class Comm(Protocol):
    """One group of `size` ranks, of which this process is `rank`. Every failure is a CommError."""

    rank: int
    size: int

    def all_to_all(self, x: Tensor, out_rows: Sequence[int], in_rows: Sequence[int]) -> Tensor:
        """Send `in_rows[i]` consecutive rows of `x` (dim 0) to rank i, receive `out_rows[i]` from it."""

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Concatenate along dim 0 what every rank holds, `rows[i]` rows from rank i."""

    def broadcast(self, x: Tensor, root: int) -> None:
        """Overwrite the contiguous `x` with the root's."""

    def all_reduce(self, x: Tensor) -> None:
        """Overwrite the contiguous `x` with the sum over ranks."""

    def synchronize(self) -> None:
        """Return when everything issued so far has happened; CommError if it never will."""

    def abort(self) -> None:
        """Make every operation, running or later, fail soon. Any thread may call it, more than once."""

    def close(self) -> None:
        """Abort and free sockets, threads and device memory; takes tens of ms, so not while others wait."""


def form(
    store: tuple[str, int],
    name: str,
    rank: int,
    size: int,
    *,
    device: torch.device | str = "cpu",
    address: str | None = None,
    form_timeout_s: float = 3.0,
    op_timeout_s: float = 30.0,
    cancelled: threading.Event | None = None,
) -> Comm:
    """Join the group `name`, unique for its lifetime, as `rank` of `size`; return when all have joined.

    `store` is host and port of a TCPStore, on a machine that is not preempted. `address` is the local IP that
    peers can reach (gloo only; NCCL obeys NCCL_SOCKET_IFNAME). Raises CommError when a member is missing
    after `form_timeout_s`, or soon after `cancelled` is set.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a group of {size}")
    where = torch.device(device)

    def build() -> Comm:
        timeout = timedelta(seconds=form_timeout_s)
        client = TCPStore(*store, is_master=False, wait_for_workers=False, timeout=timeout)
        kind = NcclComm if where.type == "cuda" else GlooComm
        return kind(PrefixStore(name, client), rank, size, where, address, form_timeout_s, op_timeout_s)

    return _Formation(build, f"group {name} of {size}").wait(form_timeout_s, cancelled or threading.Event())


class _Formation:
    """Forms a group in a thread that can be left behind.

    When a peer freezes half-way, gloo retries for five times the timeout it was given (measured), and nothing
    stops it. So the caller stops waiting; what then still comes of it is dropped.
    """

    def __init__(self, build: Callable[[], Comm], what: str) -> None:
        self._build, self._what = build, what
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._left = False
        self._comm: Comm | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="form", daemon=True).start()

    def wait(self, timeout_s: float, cancelled: threading.Event) -> Comm:
        deadline = time.monotonic() + timeout_s
        while not self._finished.wait(2e-3):
            if cancelled.is_set():
                return self._leave("cancelled")
            if time.monotonic() > deadline:
                return self._leave(f"no complete membership within {timeout_s:g} s")
        return self._leave("failed")

    def _run(self) -> None:
        comm = None
        try:
            comm = self._build()
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            self._error = error
        with self._lock:
            if not self._left:
                self._comm, comm = comm, None
        self._finished.set()
        del comm  # not `close`: its list of sockets may hold those of the next group, formed meanwhile

    def _leave(self, reason: str) -> Comm:
        with self._lock:
            self._left = True
        if self._comm is not None:
            return self._comm
        if self._error is not None:
            reason = _reason(self._error)
        raise CommError(f"{self._what} did not form: {reason}") from self._error


class _Collectives:
    """The collectives, which gloo and NCCL backends spell alike; `_run` waits in the backend's own way."""

    rank: int
    size: int
    _backend: Any

    def _run(self, issue: Callable[[], Any]) -> None:
        raise NotImplementedError

    def all_to_all(self, x: Tensor, out_rows: Sequence[int], in_rows: Sequence[int]) -> Tensor:
        out = x.new_empty((sum(out_rows), *x.shape[1:]))
        self._run(lambda: self._backend.alltoall_base(out, x.contiguous(), list(out_rows), list(in_rows)))
        return out

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        most = max(rows)  # both backends want equal shares: pad, then cut
        padded = x.new_zeros((most, *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in rows]
        self._run(lambda: self._backend.allgather([parts], [padded]))
        return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])

    def broadcast(self, x: Tensor, root: int) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._run(lambda: self._backend.broadcast([x], options))

    def all_reduce(self, x: Tensor) -> None:
        self._run(lambda: self._backend.allreduce([x]))


class GlooComm(_Collectives):
    """A group over TCP, for CPU tensors."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        address: str | None,
        form_timeout_s: float,
        op_timeout_s: float,
    ) -> None:
        self.rank, self.size = rank, size
        self._aborted = threading.Event()
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address or "127.0.0.1")]
        options._timeout = timedelta(seconds=form_timeout_s)
        before = _open_sockets()
        self._backend = ProcessGroupGloo(store, rank, size, options)
        self._backend._set_default_timeout(timedelta(seconds=op_timeout_s))
        self._sockets = _open_sockets() - before

    def _run(self, issue: Callable[[], Any]) -> None:
        with _as_comm_error(self._aborted):
            if self._aborted.is_set():
                raise RuntimeError("the group was aborted")
            issue().wait()

    def synchronize(self) -> None:
        """Nothing is outstanding: every collective waited for itself."""

    def abort(self) -> None:
        """Shut the group's sockets down, which every waiting peer notices within milliseconds."""
        self._aborted.set()
        for fd, inode in self._sockets:
            _shut_down(fd, inode)

    def close(self) -> None:
        """See `Comm.close`."""
        self.abort()
        self._sockets = set()
        self._backend = None


class NcclComm(_Collectives):
    """A group over NCCL, for CUDA tensors. Operations are queued on the current stream, as torch does."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        address: str | None,
        form_timeout_s: float,
        op_timeout_s: float,
    ) -> None:
        from torch.distributed import ProcessGroupNCCL  # not in CPU builds

        self.rank, self.size, self._device = rank, size, device
        self._op_timeout_s = op_timeout_s
        self._aborted = threading.Event()
        # A watchdog that ends the process would take the weights with it; `synchronize` does the watching.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=form_timeout_s)
        options.config.blocking = 0
        torch.cuda.set_device(device)  # per thread
        self._backend = ProcessGroupNCCL(store, rank, size, options)
        self._backend.eager_connect_single_device(device)
        # A non-blocking communicator is ready only after its first collective.
        self._backend.allreduce([torch.ones(1, device=device)]).wait()
        self._wait_stream(form_timeout_s)

    def _run(self, issue: Callable[[], Any]) -> None:
        with _as_comm_error(self._aborted):
            if self._aborted.is_set():
                raise RuntimeError("the group was aborted")
            issue().wait()  # orders streams, does not block this thread

    def synchronize(self) -> None:
        """Wait for the current stream, watching the abort flag and the operation timeout."""
        with _as_comm_error(self._aborted):
            self._wait_stream(self._op_timeout_s)

    def _wait_stream(self, timeout_s: float) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        deadline = time.monotonic() + timeout_s
        while not done.query():
            if self._aborted.is_set():
                raise RuntimeError("the group was aborted")
            if time.monotonic() > deadline:
                self.abort()
                raise RuntimeError(f"no answer within {timeout_s:g} s")
            time.sleep(50e-6)
        if self._aborted.is_set():  # an aborted kernel also counts as done, its output is garbage
            raise RuntimeError("the group was aborted")

    def abort(self) -> None:
        """Abort the NCCL communicator; kernels that wait for peers end."""
        if not self._aborted.is_set():
            self._aborted.set()
            self._backend.abort()

    def close(self) -> None:
        """See `Comm.close`."""
        self.abort()
        self._backend = None


@contextlib.contextmanager
def _as_comm_error(aborted: threading.Event) -> Iterator[None]:
    """torch reports every network fault as a RuntimeError (DistStoreError and gloo's own are ones)."""
    try:
        yield
    except RuntimeError as error:
        raise CommError(f"collective failed: {'aborted' if aborted.is_set() else _reason(error)}") from error


def _reason(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:160]


def _open_sockets() -> set[tuple[int, str]]:
    """(fd, inode) of this process's open sockets. The inode tells a reused descriptor from the old one."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("socket:"):
                found.add((int(entry), target))
    return found


def _shut_down(fd: int, inode: str) -> None:
    """Shut a connected socket down; leave a listener alone, gloo ends the process when it loses its own."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}") != inode:
            return
        with socket.socket(fileno=os.dup(fd)) as copy:
            if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.shutdown(socket.SHUT_RDWR)


def reduce_gradients(module: nn.Module, comm: Comm) -> None:
    """Sum the gradients over the group, in one collective per dtype.

    Each rank's backward covers its own tokens only, so the full gradient is the sum, not the mean. A
    parameter without a gradient on this rank counts as zero. Every rank must hold the same parameters.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    for dtype in dict.fromkeys(p.dtype for p in params):
        group = [p for p in params if p.dtype == dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in group])
        comm.all_reduce(flat)
        for p, grad in zip(group, flat.split([p.numel() for p in group]), strict=True):
            p.grad = grad.view_as(p)


def copy_weights(module: nn.Module, comm: Comm, root: int) -> None:
    """Overwrite parameters and buffers with the root's.

    The way to fetch weights from a neighbour's GPU: a private copy, so the neighbour may go at any time.
    """
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            data = tensor.data.contiguous()
            comm.broadcast(data, root)
            if data.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(data)
    comm.synchronize()
