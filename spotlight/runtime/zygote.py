"""A fork server: it has imported everything and loaded the model, so a new rank takes a fork, not a start.

The zygote never touches CUDA (a forked child could not use it) and has one thread (a fork copies no other).
Its children share the model's memory with it until they write. When whoever started the zygote goes away,
however it dies, the zygote kills its children, frozen ones too, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from spotlight.errors import ConfigError, RunError
from spotlight.runtime.link import Head, Link

DEFAULT_FACTORY = "spotlight.runtime.rank:load"
_PR_SET_PDEATHSIG = 1
# Thread pools that start at import would be missing in the forks.
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
# The zygote sees no GPU, and torch looks for one without opening the driver; its children are told which there are.
_GPUS = "CUDA_VISIBLE_DEVICES"
_NO_GPU = {_GPUS: "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a new rank needs to join a gang. The token admits one process, once."""

    host: str
    port: int
    token: str


class Zygote:
    """One per node and model. Not thread-safe."""

    def __init__(self, factory: str, spec: Mapping[str, Any], *, start_timeout_s: float = 300.0) -> None:
        """Start it; returns at once. `factory`, "module:function", takes `spec` and returns an adapter."""
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spotlight.runtime.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD, **_NO_GPU},
        )
        theirs.close()
        self._link = Link(ours)
        self._link.set_timeout(start_timeout_s)
        self._ready = False
        self._link.send({"op": "load", "factory": factory, "spec": dict(spec)})

    @property
    def pid(self) -> int:
        """Of the zygote itself."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Until the model is loaded. RunError with the reason if it cannot be."""
        if not self._ready:
            reply = self._reply()
            if reply["op"] != "loaded":
                self.close()
                raise RunError(f"the zygote could not load the model: {reply['message']}")
            self._ready = True

    def spawn(self, invitation: Invitation, device: str = "cpu") -> int:
        """Fork a rank that joins the gang; returns its pid. RunError if the zygote is gone."""
        self.wait_ready()
        self._send(
            {"op": "spawn", "gpus": os.environ.get(_GPUS), "invitation": asdict(invitation), "device": device}
        )
        return int(self._reply()["pid"])

    def kill(self, pid: int) -> None:
        """SIGKILL a rank of this zygote; one that has ended already is fine."""
        with contextlib.suppress(RunError):
            self._send({"op": "kill", "pid": pid})

    def close(self) -> None:
        """End the zygote and all its ranks. Returns when they are gone."""
        self._link.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # frozen; its ranks die with it
            self._process.kill()
            self._process.wait()

    def _send(self, head: Head) -> None:
        try:
            self._link.send(head)
        except ConnectionError as error:
            raise RunError(f"the zygote is gone: {error}") from error

    def _reply(self) -> Head:
        try:
            while not (frames := self._link.read()):
                pass
        except ConnectionError as error:
            raise RunError(f"the zygote is gone: {error}") from error
        return frames[0][0]


def _serve(fd: int) -> None:
    """The zygote's main loop."""
    link = Link(socket.socket(fileno=fd))
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    adapter: Any = None
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([fd, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _reap(children)
        if fd not in readable:
            continue
        try:
            frames = link.read()
        except ConnectionError:
            _end(children)
        for head, _ in frames:
            if head["op"] == "load":
                adapter = _load(link, head)
            elif head["op"] == "spawn":
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    _become_rank([fd, wake_read, wake_write], head, adapter)
                children.add(pid)
                link.send({"op": "spawned", "pid": pid})
            elif head["op"] == "kill" and head["pid"] in children:
                os.kill(head["pid"], signal.SIGKILL)


def _load(link: Link, head: Head) -> Any:
    try:
        adapter = _resolve(head["factory"])(head["spec"])
        _check_forkable()
    except Exception as error:  # noqa: BLE001 - reported to the parent, who raises it
        link.send({"op": "failed", "message": f"{error!r:.500}"})
        os._exit(1)
    link.send({"op": "loaded"})
    return adapter


def _become_rank(inherited: list[int], head: Head, adapter: Any) -> None:
    """In the child: forget the zygote, join the gang. Never returns."""
    import torch

    from spotlight.runtime import rank

    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for fd in inherited:
            os.close(fd)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        see_gpus(head["gpus"])
        invitation = Invitation(**head["invitation"])
        hello = {"token": invitation.token}
        rank.run((invitation.host, invitation.port), hello, adapter, torch.device(head["device"]))
        status = 0
    except (OSError, ConnectionError):
        pass  # the gang is gone
    except BaseException as error:  # noqa: BLE001 - a child must not run on into the zygote's loop
        sys.stderr.write(json.dumps({"rank": os.getpid(), "error": repr(error)[:500]}) + "\n")
    finally:
        os._exit(status)


def see_gpus(visible: str | None) -> None:
    """Before anything in this process asks for a GPU; None: all of them."""
    os.environ.pop(_GPUS, None)
    if visible is not None:
        os.environ[_GPUS] = visible


def _resolve(factory: str) -> Any:
    module, _, name = factory.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"no factory {factory!r}: {error}") from error


def _check_forkable() -> None:
    import torch

    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RunError(f"the factory left {threads - 1} threads running; forks of this process may hang")
    if torch.cuda.is_initialized():
        raise RunError("the factory touched CUDA; forks of this process cannot use it")


def _reap(children: set[int]) -> None:
    for pid in list(children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.discard(pid)


def _end(children: set[int]) -> None:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    os._exit(0)


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    importlib.import_module("spotlight.runtime.rank")
    _serve(int(sys.argv[1]))


if __name__ == "__main__":
    _main()
