"""A rank: the process that keeps one GPU's model, and swaps only its communicator when the group changes.

Two threads. The control thread reads commands and answers `ping` and `abort` at once, so a rank that waits
for a dead peer inside a collective can be called back. The compute thread (the main one) does the rest in
order. The gang alone decides; a rank refuses what belongs to an epoch before its own.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spotlight.errors import CommError, ConfigError, FencedError, SpotlightError
from spotlight.parallel import comm
from spotlight.parallel.comm import Comm
from spotlight.parallel.ulysses import install
from spotlight.rl.models import Conditioning, ModelAdapter, load_model
from spotlight.runtime.link import Frame, Head, Link
from spotlight.store import weights

_IDLE_S = 0.5  # after so long without a command, broken groups are taken apart


class Rank:
    """Serves one gang until told to exit or the gang hangs up."""

    def __init__(self, link: Link, adapter: ModelAdapter, device: torch.device) -> None:
        self._link, self._adapter, self._device = link, adapter, device
        self._sharding = install(adapter.transformer)
        self._jobs: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._comm: Comm | None = None
        self._broken: list[Comm] = []
        self._epoch = 0
        self._aborted_epoch = 0
        self._cancelled = threading.Event()

    def serve(self) -> None:
        """Never returns: the process ends with the connection, whatever the compute thread is stuck in."""
        threading.Thread(target=self._control, name="control", daemon=True).start()
        self._link.send({"op": "ready", "device": str(self._device)})
        while True:
            try:
                head, tensors = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                self._bury()
                continue
            self._link.send(*self._answer(head, tensors))

    def _control(self) -> None:
        try:
            while True:
                for frame in self._link.read():
                    op, epoch = frame[0]["op"], frame[0].get("epoch", 0)
                    if op == "ping":
                        self._link.send({"op": "pong"})
                    elif op == "abort":
                        self._abort(epoch)
                    else:
                        self._jobs.put(frame)
        except ConnectionError:
            os._exit(0)

    def _abort(self, epoch: int) -> None:
        self._aborted_epoch = max(self._aborted_epoch, epoch)
        self._cancelled.set()
        group = self._comm
        if group is not None and self._epoch <= epoch:
            group.abort()

    def _answer(self, head: Head, tensors: dict[str, Tensor]) -> Frame:
        about = {"re": head["op"], "epoch": head.get("epoch"), "seq": head.get("seq")}
        try:
            self._check_epoch(head)
            result, output = self._do(head, tensors)
            return {"op": "done", **about, **result}, output
        except FencedError as error:  # changes nothing here
            code, message = error.code, error.message
        except SpotlightError as error:
            self._leave()  # the peers that wait for this rank are freed too
            code, message = error.code, error.message
        except Exception as error:  # noqa: BLE001 - the gang decides what to do about it
            self._leave()
            code, message = "internal", f"{error!r:.500}"
        return {"op": "failed", **about, "code": code, "message": message}, {}

    def _check_epoch(self, head: Head) -> None:
        if not isinstance(head.get("epoch"), int) or head["epoch"] < self._epoch:
            raise FencedError(f"epoch {head.get('epoch')} has passed, this is {self._epoch}")

    def _do(self, head: Head, tensors: dict[str, Tensor]) -> Frame:
        if head["op"] == "form":
            return self._form(head), {}
        if head["op"] == "velocity":
            return self._velocity(head, tensors)
        if head["op"] == "bind":
            return {"digest": weights.bind(self._adapter.transformer, tensors)}, {}
        raise ConfigError(f"unknown command {head['op'][:40]!r}")

    def _form(self, head: Head) -> Head:
        start = time.monotonic()
        self._leave()
        self._epoch = head["epoch"]
        self._cancelled.clear()
        if self._aborted_epoch >= self._epoch:
            raise CommError("aborted before it formed")
        if head["size"] > 1:
            self._comm = comm.form(
                (head["store"][0], head["store"][1]),
                head["name"],
                head["rank"],
                head["size"],
                device=self._device,
                address=self._link.local_address,
                form_timeout_s=head["form_timeout_s"],
                op_timeout_s=head["op_timeout_s"],
                cancelled=self._cancelled,
            )
        formed = time.monotonic()
        self._sharding.bind(self._comm)
        return {"form_s": formed - start, "bind_s": time.monotonic() - formed}

    @torch.no_grad()
    def _velocity(self, head: Head, tensors: dict[str, Tensor]) -> Frame:
        start = time.monotonic()
        cond, negative = (_conditioning(tensors, prefix, self._device) for prefix in ("cond.", "negative."))
        if cond is None:
            raise ConfigError("a forward without conditioning")
        output = self._adapter.velocity(
            tensors["latents"].to(self._device),
            tensors["t"].to(self._device),
            cond,
            negative=negative,
            cfg=head["cfg"],
        )
        if self._comm is not None:
            self._comm.synchronize()
        leads = self._comm is None or self._comm.rank == 0
        return {"forward_s": time.monotonic() - start}, {"v": output.cpu()} if leads else {}

    def _leave(self) -> None:
        """Out of the present group; taking it apart waits until nothing else does."""
        group, self._comm = self._comm, None
        self._sharding.bind(None)
        if group is not None:
            group.abort()
            self._broken.append(group)

    def _bury(self) -> None:
        while self._broken:
            self._broken.pop().close()


def run(
    address: tuple[str, int], hello: Mapping[str, Any], adapter: ModelAdapter, device: torch.device
) -> None:
    """Connect to the gang at `address`, say `hello` (with the invitation's token), and serve it."""
    link = Link(socket.create_connection(address, timeout=10))
    link.set_timeout(None)
    link.send({"op": "hello", "pid": os.getpid(), **hello})
    adapter.transformer.to(device)
    Rank(link, adapter, device).serve()


def load(spec: Mapping[str, Any]) -> ModelAdapter:
    """The default factory of a zygote: `spec` holds a `ModelConfig` under "model"."""
    from spotlight.config import ModelConfig

    return load_model(ModelConfig.model_validate(spec["model"]))


def _conditioning(tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> Conditioning | None:
    found = {n.removeprefix(prefix): t.to(device) for n, t in tensors.items() if n.startswith(prefix)}
    return Conditioning(found) if found else None
