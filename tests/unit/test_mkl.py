"""The mode of MKL in which a row of a matrix product does not depend on the other rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spotlight._mkl import strict_mode


def cpu(vendor: str, flags: str) -> str:
    one = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: a: b\nflags\t\t: {flags}\nbogomips\t: 1\n"
    return one + "\n" + one.replace("flags", "cut")


@pytest.mark.parametrize(
    ("vendor", "flags", "mode"),
    [
        ("GenuineIntel", "fpu avx avx2 avx512f", "AVX512,STRICT"),
        ("GenuineIntel", "fpu avx avx2", "AVX2,STRICT"),
        ("GenuineIntel", "fpu avx", None),
        ("AuthenticAMD", "fpu avx avx2 avx512f", None),
    ],
)
def test_the_mode_follows_from_the_cpu(vendor: str, flags: str, mode: str | None) -> None:
    assert strict_mode(cpu(vendor, flags)) == mode


@pytest.mark.parametrize("text", ["", "\n\n", "processor\t: 0\nHardware\t: ARM\n", "flags: avx2"])
def test_a_cpu_list_of_another_kind_has_no_mode(text: str) -> None:
    assert strict_mode(text) is None


def test_what_the_user_chose_stays() -> None:
    code = "import spotlight, os; print(os.environ['MKL_CBWR'])"
    chosen = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MKL_CBWR": "AVX2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert chosen.stdout.strip() == "AVX2"


@pytest.mark.skipif(
    strict_mode(Path("/proc/cpuinfo").read_text()) is None, reason="this CPU has no strict mode of MKL"
)
@pytest.mark.parametrize(("width", "out"), [(96, 384), (384, 96), (128, 512), (7, 5)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(width: int, out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(128, width, generator=generator), torch.randn(out, width, generator=generator)
    whole = torch.nn.functional.linear(x, weight)
    for rows in range(1, 64):
        assert torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows])
        assert torch.equal(torch.nn.functional.linear(x[rows:].clone(), weight), whole[rows:])
