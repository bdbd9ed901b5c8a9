"""How a node's GPUs are shared out."""

from __future__ import annotations

import pytest

from spotlight.runtime.crew import places


@pytest.mark.parametrize(
    ("gpus", "degree", "expected"),
    [
        (1, 1, [(0,)]),
        (4, 1, [(0,), (1,), (2,), (3,)]),
        (4, 2, [(0, 1), (2, 3)]),
        (8, 3, [(0, 1, 2), (3, 4, 5, 6, 7)]),
        (4, 4, [(0, 1, 2, 3)]),
        (4, 0, [(0, 1, 2, 3)]),
        (1, 0, [(0,)]),
    ],
)
def test_every_gpu_has_one_place(gpus: int, degree: int, expected: list[tuple[int, ...]]) -> None:
    assert places(gpus, degree) == expected
    assert sorted(gpu for place in places(gpus, degree) for gpu in place) == list(range(gpus))
