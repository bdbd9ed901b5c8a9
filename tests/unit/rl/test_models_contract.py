"""Every adapter against diffusers' own pipeline, on tiny random weights of the real classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from fakes import adapter_contract as contract
from fakes import tiny_pipelines

from spotlight.errors import ConfigError


@pytest.fixture(scope="module", params=tiny_pipelines.KINDS)
def folder(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of(request.param)


@pytest.fixture
def pipe(folder: Path) -> DiffusionPipeline:
    return tiny_pipelines.build(folder.name)


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("size", contract.SIZES)
def test_images_are_the_pipelines(folder: Path, pipe: DiffusionPipeline, size, cfg: float):
    contract.check_images(folder, pipe, size, cfg)


def test_prompt_and_guidance_change_the_image(folder: Path):
    contract.check_guidance_matters(folder)


def test_a_sample_does_not_depend_on_its_batch(folder: Path):
    contract.check_batch_does_not_matter(folder)


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("algorithm", contract.ALGORITHMS)
def test_one_training_step(folder: Path, algorithm: str, mode: str):
    contract.check_training_step(folder, algorithm, mode)


def test_training_with_guidance(folder: Path):
    contract.check_training_step(folder, "flow_grpo", "lora", cfg=3.0)


def test_a_lora_export_loads_into_the_pipeline(folder: Path, pipe: DiffusionPipeline, tmp_path: Path):
    contract.check_lora_export(folder, pipe, tmp_path / "export")


@pytest.mark.parametrize(("degree", "size"), [(2, (64, 64)), (2, (48, 80)), (3, (48, 80))])
def test_sequence_parallel_equals_one_process(folder: Path, degree: int, size):
    contract.check_sequence_parallel(folder, degree, size)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(folder: Path, pipe: DiffusionPipeline, dtype: str):
    contract.check_precision(folder, pipe, dtype)


@pytest.mark.parametrize("size", [(50, 64), (64, 8), (24, 24)])
def test_a_size_of_broken_tokens_is_refused(folder: Path, size):
    with pytest.raises(ConfigError, match="cannot draw") as caught:
        contract.load(folder).latent_shape(*size)
    assert "multiples of 16" in str(caught.value.hint)
