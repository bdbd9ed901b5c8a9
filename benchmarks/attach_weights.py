"""Attaching weights from the node's shared memory in a new process, against reading them from a cold disk.

    python benchmarks/attach_weights.py [--gigabytes 2] [--repeats 5]

Memory is read while two processes hold all pages: proportional set size (PSS) charges each with its half, and
`private_copies` would show a second copy. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from spotlight.store import arena

ATTACH = """
import json, sys, time, torch
from pathlib import Path
from safetensors.torch import load_file
from spotlight.store import arena
def memory():
    rows = (line.split() for line in open("/proc/self/smaps_rollup") if "kB" in line)
    return {row[0][:-1]: int(row[1]) / 1024 for row in rows}
before, start = memory(), time.monotonic()
tensors = arena.attach(Path(sys.argv[2])) if sys.argv[1] == "arena" else load_file(sys.argv[2])
attached = time.monotonic()
for t in tensors.values():
    t.view(-1)[::2048].float().sum()
touched = time.monotonic()
print("touched", flush=True)
sys.stdin.readline()
after = memory()
mib = {key.lower() + "_mib": round(after[key] - before[key], 1) for key in ("Rss", "Pss", "Anonymous")}
print(json.dumps({"attach_ms": 1e3 * (attached - start), "touch_ms": 1e3 * (touched - attached), **mib}), flush=True)
sys.stdin.readline()
"""


def attach(kind: str, path: Path, processes: int = 2) -> list[dict[str, float]]:
    """Attach and touch in new processes; memory is read once all hold the weights."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", ATTACH, kind, str(path)]
    started = []
    for _ in range(processes):  # one after the other, so that times do not disturb each other
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "touched\n"
        started.append(process)
    reports = []
    for process in started:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        reports.append(json.loads(process.stdout.readline()))
    for process in started:
        process.communicate("\n")
    return reports


def weights_benchmark(gigabytes: float, repeats: int) -> dict[str, float]:
    """Shared memory against a disk whose cache was dropped (as far as this user may drop it)."""
    shapes, tensors, size = [(1024, 1024), (3072, 1024), (512, 2048)], {}, 0
    while size < gigabytes * 1e9:
        tensors[f"block.{len(tensors)}"] = torch.ones(shapes[len(tensors) % 3], dtype=torch.bfloat16)
        size += tensors[f"block.{len(tensors) - 1}"].nbytes
    folder = Path(tempfile.mkdtemp(prefix="spotlight-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="spotlight-bench-"))
    try:
        save_file(tensors, disk / "weights.safetensors")
        start = time.monotonic()
        arena.create_from_files(folder / "arena", [disk / "weights.safetensors"])
        fill_s = time.monotonic() - start
        del tensors
        shared = [r for _ in range(-(-repeats // 2)) for r in attach("arena", folder / "arena")]
        from_disk = []
        for _ in range(3):
            drop_from_cache(disk / "weights.safetensors")
            from_disk += attach("safetensors", disk / "weights.safetensors", processes=1)
        return {
            "attach_2gb_ms": median(r["attach_ms"] for r in shared),
            "attach_2gb_touch_ms": median(r["touch_ms"] for r in shared),
            "attach_2gb_rss_mib": median(r["rss_mib"] for r in shared),
            "attach_2gb_pss_mib": median(r["pss_mib"] for r in shared),
            "attach_2gb_private_copies_mib": median(r["anonymous_mib"] for r in shared),
            "cold_disk_2gb_ms": median(r["attach_ms"] + r["touch_ms"] for r in from_disk),
            "fill_2gb_ms": 1e3 * fill_s,
            "attached_bytes": size,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="only the JSON line (the only output there is)")
    args = parser.parse_args()
    print(json.dumps(weights_benchmark(args.gigabytes, args.repeats)))


if __name__ == "__main__":
    main()
