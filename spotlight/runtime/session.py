"""A run's own Ray cluster, from its head: token, head process, driver connection, and the way back to nothing.

    start()  ->  place actors with `on(node_id)`  ->  close()

`close` may be called in any state, more than once, and leaves no process, no socket and no temporary folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from spotlight.errors import RunError
from spotlight.provision.base import NodeSpec, Role
from spotlight.provision.local import LocalProvider
from spotlight.runtime import ray_node

START_S = 120.0  # a slow disk and two busy cores
HEAD = NodeSpec(name="od0", role=Role.ON_DEMAND, head=True)


class Session:
    """Owns the processes of the run on this machine: the head, and in a local run every other node too.

    `at` is the head's host:port when nodes of other machines join; they have the token already, in `token`.
    """

    def __init__(self, folder: Path, *, at: str | None = None, token: Path | None = None) -> None:
        self._folder = folder
        # Unix socket paths are short: Ray's folder cannot lie in the run's.
        self._temp = Path(tempfile.mkdtemp(prefix="spotlight-"))
        self._given_token = token
        self._token = token or self._temp / "token"
        self._address = at or f"127.0.0.1:{ray_node.free_port()}"
        self._before: dict[str, str | None] = {}
        self.provider = LocalProvider(
            command=lambda spec: ray_node.start_command(
                spec,
                address=self._address,
                temp_dir=self._temp / "ray",
                host=self._address.rsplit(":", 1)[0],
                ports=ray_node.cloud_ports() if at else ray_node.local_ports(),
            ),
            log_dir=folder / "logs",
            environment=ray_node.environment(self._token),
        )

    def start(self) -> None:
        """Bring the head up and connect to it. Raises RunError when it does not come."""
        if self._given_token is None:
            ray_node.write_token(self._token)
        self._set_environment(ray_node.environment(self._token))
        self.provider.launch(HEAD)
        deadline = time.monotonic() + START_S
        self._await_port(deadline)
        self._connect(deadline)

    def on(self, node_id: str) -> dict[str, Any]:
        """Ray options that place an actor on exactly that node, for good."""
        return {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }

    def node_ids(self) -> dict[str, str]:
        """Ray's id of every node that Ray takes for alive, by our name. A relaunched node has a new id."""
        prefix = ray_node.resource("")
        found: dict[str, str] = {}
        for node in ray.nodes():
            for resource in node["Resources"] if node["Alive"] else ():
                if resource.startswith(prefix):
                    found.setdefault(node["NodeID"], resource.removeprefix(prefix))
        return found

    @property
    def address(self) -> str:
        """The head's own, as the other nodes reach it."""
        return self._address.rsplit(":", 1)[0]

    def head_id(self) -> str:
        """The head's."""
        return next(node_id for node_id, name in self.node_ids().items() if name == HEAD.name)

    def close(self) -> None:
        """Disconnect and kill everything; keep Ray's logs in the run folder."""
        with contextlib.suppress(Exception):  # a cluster half dead cannot say goodbye; it is killed next
            ray.shutdown()
        self.provider.close()
        self._keep_logs()
        shutil.rmtree(self._temp, ignore_errors=True)
        self._restore_environment()

    def _await_port(self, deadline: float) -> None:
        host, port = self._address.rsplit(":", 1)
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
                return
            self._check_head(deadline)
            time.sleep(0.05)

    def _connect(self, deadline: float) -> None:
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        while True:
            try:
                with _own_sigterm():
                    ray.init(
                        address=self._address,
                        namespace="spotlight",
                        log_to_driver=False,
                        configure_logging=False,
                    )
                _hush()
                return
            except (ConnectionError, RuntimeError) as error:
                self._check_head(deadline, error)
                time.sleep(0.2)

    def _check_head(self, deadline: float, error: Exception | None = None) -> None:
        (head,) = (node for node in self.provider.list() if node.name == HEAD.name)
        if head.state == "gone" or time.monotonic() > deadline:
            why = head.reason or f"no connection within {START_S:.0f} s ({str(error)[:200]})"
            raise RunError(
                f"the Ray head did not start: {why}", hint=f"see {self._folder / 'logs' / 'od0.log'}"
            )

    def _keep_logs(self) -> None:
        for log in (self._temp / "ray").glob("session_*/logs/worker-*"):
            if log.is_file() and not log.is_symlink() and log.stat().st_size:
                with contextlib.suppress(OSError):
                    shutil.copy2(log, self._folder / "logs" / log.name)

    def _set_environment(self, values: Mapping[str, str]) -> None:
        """Ray reads its settings from the environment; the driver must have the same as its nodes."""
        self._before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        _reread_settings()

    def _restore_environment(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _reread_settings()


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep our handler: Ray puts in one that prints a stack and exits with code 15."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _hush() -> None:
    """Keep Ray from printing on our stdout that a node died; the journal says it, once.

    There is no switch for it: its listening thread ends when told to stop and its subscription is closed.
    """
    from ray._private.worker import global_worker

    global_worker.threads_stopped.set()
    global_worker.gcs_error_subscriber.close()


def _reread_settings() -> None:
    """Ray reads its environment once, when it is imported; a process that has had another cluster needs this."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
