"""Results of samples: equal repeats are one object, different ones never touch each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from spotlight.core.types import SampleId
from spotlight.errors import IntegrityError, NotFoundError
from spotlight.store.artifacts import Artifacts
from spotlight.store.objects import open_store

SAMPLE = SampleId(12, 34, 5)
RESULT = {"latents": torch.arange(8.0).reshape(2, 4), "steps": torch.tensor(4)}


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(open_store(tmp_path))


def test_round_trip(artifacts: Artifacts, tmp_path: Path) -> None:
    digest = artifacts.put(SAMPLE, 3, RESULT)
    got = artifacts.get(SAMPLE, 3, digest)
    assert got.keys() == RESULT.keys()
    assert all(got[name].equal(tensor) for name, tensor in RESULT.items())
    assert (tmp_path / f"artifacts/it12/row34/s5/v3-{digest}.safetensors").exists()


def test_a_zombie_cannot_touch_what_was_committed(artifacts: Artifacts) -> None:
    digest = artifacts.put(SAMPLE, 3, RESULT)
    assert artifacts.put(SAMPLE, 3, {name: tensor.clone() for name, tensor in RESULT.items()}) == digest
    other = artifacts.put(SAMPLE, 3, RESULT | {"steps": torch.tensor(3)})
    assert other != digest
    assert artifacts.get(SAMPLE, 3, digest)["steps"] == 4
    assert artifacts.get(SAMPLE, 3, other)["steps"] == 3


def test_each_version_has_its_own(artifacts: Artifacts) -> None:
    first = artifacts.put(SAMPLE, 3, RESULT)
    artifacts.put(SAMPLE, 4, {"latents": torch.zeros(1)})
    with pytest.raises(NotFoundError):
        artifacts.get(SAMPLE, 4, first)


def test_many_workers_at_once_leave_every_result_whole(artifacts: Artifacts) -> None:
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(lambda i: artifacts.put(SAMPLE, 0, {"x": torch.tensor(i % 2)}), range(8)))
    assert len(set(digests)) == 2
    assert sorted(int(artifacts.get(SAMPLE, 0, digest)["x"]) for digest in set(digests)) == [0, 1]


def test_damage_is_noticed(artifacts: Artifacts, tmp_path: Path) -> None:
    digest = artifacts.put(SAMPLE, 3, RESULT)
    file = tmp_path / f"artifacts/it12/row34/s5/v3-{digest}.safetensors"
    bad = bytearray(file.read_bytes())
    bad[-1] ^= 1
    file.write_bytes(bad)
    with pytest.raises(IntegrityError, match="committed was"):
        artifacts.get(SAMPLE, 3, digest)


def test_an_iteration_is_discarded_alone(artifacts: Artifacts) -> None:
    for iteration in (1, 10):
        for seed in (0, 1):
            digest = artifacts.put(SampleId(iteration, 0, seed), 0, RESULT)
    assert artifacts.discard(1) == 2
    assert artifacts.discard(1) == 0
    assert artifacts.get(SampleId(10, 0, 1), 0, digest)
