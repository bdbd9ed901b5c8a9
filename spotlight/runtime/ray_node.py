"""Command lines and environment of our own Ray: token always, our ports only, nothing shared with another Ray."""

from __future__ import annotations

import json
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from spotlight.provision.base import NodeSpec

# Arguments up to this size travel inside the call itself. Anything larger would be owned by the caller, and
# an object owned by a spot node dies with it.
INLINE_BYTES = 8 << 20
OBJECT_STORE_BYTES = 100 << 20


def environment(token_file: Path) -> dict[str, str]:
    """What every process of a run's Ray must have in its environment."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_max_direct_call_object_size": str(INLINE_BYTES),
        "RAY_task_rpc_inlined_bytes_limit": str(4 * INLINE_BYTES),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        # Our detector is the coordinator's heartbeat; Ray's own patience only delays its bookkeeping.
        "RAY_health_check_initial_delay_ms": "2000",
        "RAY_health_check_period_ms": "1000",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # our processes choose their GPUs themselves
        "OMP_NUM_THREADS": "1",
    }


def write_token(path: Path) -> None:
    """Make the run's secret: 32 random bytes as hex, readable by the owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def free_port() -> int:
    """A TCP port on loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def resource(node: str) -> str:
    """The Ray resource by which an actor is placed on one node."""
    return f"spotlight-{node}"


def local_ports() -> list[str]:
    """Ports of a node on a host that others use too: whatever is free."""
    return [
        f"--ray-client-server-port={free_port()}",
        f"--dashboard-agent-listen-port={free_port()}",
        f"--metrics-export-port={free_port()}",
    ]


def cloud_ports() -> list[str]:
    """Ports of a node on a machine of its own, beside SkyPilot's Ray (6380, 8266, 8076, 52365, 10001 onwards)."""
    return [
        "--ray-client-server-port=20001",
        "--min-worker-port=20002",
        "--max-worker-port=29999",
        "--dashboard-agent-listen-port=52366",
    ]


def start_command(
    spec: NodeSpec, *, address: str, temp_dir: Path, host: str, ports: Sequence[str]
) -> Sequence[str]:
    """`ray start --block` for a node at `host`. `address` is host:port of the head's GCS.

    No CPUs are offered: actors are placed by the node's own resource, and Ray starts no idle workers.
    """
    port = address.rsplit(":", 1)[1]
    head = [
        "--head",
        f"--port={port}",
        f"--temp-dir={temp_dir}",
        "--include-dashboard=false",
    ]
    return [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--block",
        *(head if spec.head else [f"--address={address}"]),
        f"--node-ip-address={host}",
        *ports,
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--num-cpus=0",
        "--num-gpus=0",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--resources=" + json.dumps({resource(spec.name): 1}),
    ]
