"""Results of samples: once per sample and version, equal repeats welcome, zombies refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from spotlight.core.types import SampleId
from spotlight.errors import FencedError, IntegrityError, NotFoundError
from spotlight.store.artifacts import Artifacts
from spotlight.store.objects import open_store

SAMPLE = SampleId(12, 34, 5)
RESULT = {"latents": torch.arange(8.0).reshape(2, 4), "steps": torch.tensor(4)}


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(open_store(tmp_path))


def test_round_trip(artifacts: Artifacts, tmp_path: Path) -> None:
    digest = artifacts.put(SAMPLE, 3, RESULT)
    got = artifacts.get(SAMPLE, 3, digest=digest)
    assert got.keys() == RESULT.keys()
    assert all(got[name].equal(tensor) for name, tensor in RESULT.items())
    assert (tmp_path / "artifacts/it12/row34/s5/v3.safetensors").exists()


def test_a_zombie_is_refused_unless_it_brings_the_same(artifacts: Artifacts) -> None:
    digest = artifacts.put(SAMPLE, 3, RESULT)
    assert artifacts.put(SAMPLE, 3, {name: tensor.clone() for name, tensor in RESULT.items()}) == digest
    with pytest.raises(FencedError, match="it12/row34/s5/v3"):
        artifacts.put(SAMPLE, 3, RESULT | {"steps": torch.tensor(3)})
    assert artifacts.get(SAMPLE, 3, digest=digest)


def test_each_version_has_its_own(artifacts: Artifacts) -> None:
    artifacts.put(SAMPLE, 3, RESULT)
    artifacts.put(SAMPLE, 4, {"latents": torch.zeros(1)})
    assert artifacts.get(SAMPLE, 4)["latents"].shape == (1,)


def test_of_many_workers_one_wins(artifacts: Artifacts) -> None:
    def put(i: int) -> bool:
        try:
            artifacts.put(SAMPLE, 0, {"x": torch.tensor(i)})
        except FencedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(put, range(8)))
    assert won.count(True) == 1
    assert artifacts.get(SAMPLE, 0)["x"] == won.index(True)


def test_damage_is_noticed(artifacts: Artifacts, tmp_path: Path) -> None:
    digest = artifacts.put(SAMPLE, 3, RESULT)
    file = tmp_path / "artifacts/it12/row34/s5/v3.safetensors"
    bad = bytearray(file.read_bytes())
    bad[-1] ^= 1
    file.write_bytes(bad)
    with pytest.raises(IntegrityError, match="committed was"):
        artifacts.get(SAMPLE, 3, digest=digest)
    with pytest.raises(NotFoundError):
        artifacts.get(SAMPLE, 4)


def test_an_iteration_is_discarded_alone(artifacts: Artifacts) -> None:
    for iteration in (1, 10):
        for seed in (0, 1):
            artifacts.put(SampleId(iteration, 0, seed), 0, RESULT)
    assert artifacts.discard(1) == 2
    assert artifacts.discard(1) == 0
    assert artifacts.get(SampleId(10, 0, 1), 0)
