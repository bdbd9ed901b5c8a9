"""Makes Intel's MKL give a row of a matrix product the same bits whatever the number of rows.

Left alone, MKL takes another kernel for short matrices, and which ones are short differs by CPU: up to 3 rows on one
kind, up to 15 on another. Its strict mode of conditional numerical reproducibility has one kernel for all (measured:
1 to 200 rows equal, at 0.9 to 1.0 of the speed). It exists on Intel's CPUs only; on others MKL would fall to its
slowest kernel, which differs from row to row, so there `rl.batching` and `parallel.ulysses` keep batches long enough.

Source: Intel oneMKL Developer Guide for Linux, "Obtaining Numerically Reproducible Results", variable MKL_CBWR.
"""

from __future__ import annotations

import os
from pathlib import Path

HEAD = 8192  # bytes of the CPU list that are read; the first CPU speaks for all
MODES = {"avx512f": "AVX512,STRICT", "avx2": "AVX2,STRICT"}  # CPU flag -> mode, fastest first


def strict_mode(cpuinfo: str) -> str | None:
    """The value of MKL_CBWR for the CPU that `/proc/cpuinfo` describes; None where there is no such mode."""
    first = cpuinfo.split("\n\n")[0]
    fields = {name.strip(): text for name, _, text in (line.partition(":") for line in first.splitlines())}
    if fields.get("vendor_id", "").strip() != "GenuineIntel":
        return None
    flags = fields.get("flags", "").split()
    return next((mode for flag, mode in MODES.items() if flag in flags), None)


def same_bits_in_every_batch() -> None:
    """Choose the strict mode for this process and its children, unless the user chose a mode."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            mode = strict_mode(file.read(HEAD))
    except OSError:
        return  # not Linux
    if mode is not None:
        os.environ.setdefault("MKL_CBWR", mode)
