"""A machine of a cloud run, as the scripts of `sky/` start it: `python -m spotlight.runtime.node check|head|worker`.

    check     refuse a node whose Ray or Python is not the run's, before it joins
    worker    this machine's part of the run's Ray, until the head or the machine is gone
    head      the same, and the run itself (`runtime.head`)

What it needs to know is in SPOTLIGHT_* variables; the token is in a file that only its owner can read.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from spotlight.errors import CredentialError, PreconditionError, RunError, SpotlightError
from spotlight.provision.base import NodeSpec, NodeState, Role
from spotlight.provision.local import LocalProvider
from spotlight.runtime import ray_node

HOME = Path.home() / ".spotlight"
TOKEN, PID = HOME / "token", HOME / "node.pid"
HEAD_PORT = 6479  # not Ray's own 6379, which a user may have taken, nor SkyPilot's 6380
AWAIT_HEAD_S = 600.0
_ADDRESS = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}:\d{1,5}", re.ASCII)


def check_versions(environ: Mapping[str, str]) -> None:
    """Raises PreconditionError naming both versions where this node's differ from the run's."""
    ours = {
        "Ray": importlib.metadata.version("ray"),
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    for name, variable in (("Ray", "SPOTLIGHT_RAY"), ("Python", "SPOTLIGHT_PYTHON")):
        wanted = environ.get(variable, "")
        if wanted and wanted != ours[name]:
            raise PreconditionError(
                f"this node has {name} {ours[name]}, the run has {wanted}",
                hint="an image with the run's versions, or none that brings /opt/spotlight",
            )


def use_region(environ: MutableMapping[str, str]) -> None:
    """Let the S3 client of this node know its region, which SkyPilot tells and no image does."""
    try:
        region = json.loads(environ.get("SKYPILOT_CLUSTER_INFO", "{}")).get("region")
    except (ValueError, AttributeError):
        return
    if isinstance(region, str) and "AWS_REGION" not in environ:
        environ["AWS_REGION"] = region


def check_token(path: Path) -> Path:
    """Refuse to start an open Ray. Raises CredentialError when the token is missing or others may read it."""
    if not path.is_file() or not path.read_text().strip():
        raise CredentialError(f"no token in {path}", hint="bootstrap.sh writes it")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise CredentialError(f"{path} can be read by others", hint=f"chmod 600 {path}")
    return path


def own_address(environ: Mapping[str, str]) -> str:
    """This machine's private address: SkyPilot's word, by rank."""
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    rank = environ.get("SKYPILOT_NODE_RANK", "0")
    if not rank.isdigit() or int(rank) >= len(addresses):
        raise PreconditionError(f"SkyPilot gave no address for rank {rank[:10]!r}")
    return addresses[int(rank)]


def spec_of(environ: Mapping[str, str]) -> NodeSpec:
    """This node. In a cluster of several on-demand machines the rank counts on from the first one's name."""
    name, rank = environ["SPOTLIGHT_NODE"], int(environ.get("SKYPILOT_NODE_RANK", "0"))
    if name.startswith("od"):
        name = f"od{int(name[2:]) + rank}"
    role = Role.SPOT if name.startswith("s") else Role.ON_DEMAND
    return NodeSpec(name=name, role=role, gpus=int(environ.get("SPOTLIGHT_GPUS") or 0))


def serve(environ: Mapping[str, str]) -> None:
    """Join the head and stay. Returns on SIGTERM; raises RunError when Ray ends, which it does with the head."""
    head = environ.get("SPOTLIGHT_HEAD") or f"{environ['SKYPILOT_NODE_IPS'].split()[0]}:{HEAD_PORT}"
    if not _ADDRESS.fullmatch(head):
        raise PreconditionError(f"bad address of the head: {head[:60]!r}")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _await_head(head, stop)
    provider = LocalProvider(
        command=lambda spec: ray_node.start_command(
            spec, address=head, temp_dir=Path(), host=own_address(environ), ports=ray_node.cloud_ports()
        ),
        log_dir=HOME / "logs",
        environment=ray_node.environment(check_token(TOKEN)),
    )
    provider.launch(spec_of(environ))
    try:
        while not stop.wait(0.5):
            (info,) = provider.list()
            if info.state is NodeState.GONE:
                raise RunError(f"Ray ended: {info.reason}", hint=f"see {HOME / 'logs'}")
    finally:
        provider.close()


def _await_head(address: str, stop: threading.Event) -> None:
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + AWAIT_HEAD_S
    while not stop.is_set():
        try:
            socket.create_connection((host, int(port)), 2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"the head {address} cannot be reached: {error}") from None
            stop.wait(1.0)


def main(arguments: list[str]) -> int:
    """Do what was asked; an error is one line and its exit code."""
    try:
        if arguments == ["check"]:
            check_versions(os.environ)
            return 0
        HOME.mkdir(mode=0o700, exist_ok=True)
        use_region(os.environ)
        PID.write_text(str(os.getpid()))
        if arguments == ["head"] and os.environ.get("SKYPILOT_NODE_RANK", "0") == "0":
            from spotlight.runtime import head

            head.run(os.environ)
        else:
            serve(os.environ)
        return 0
    except SpotlightError as error:
        sys.stderr.write(
            f"error[{error.code}]: {error.message}\n{'hint: ' + error.hint if error.hint else ''}\n"
        )
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
