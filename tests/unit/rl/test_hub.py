"""Pretrained parts: found, complete, safetensors, and told apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from fakes import adapter_contract as contract
from safetensors.torch import load_file, save_file

from spotlight.config import ModelConfig
from spotlight.errors import ConfigError, IntegrityError, NotFoundError
from spotlight.rl import hub
from spotlight.rl.models import load_model

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return contract.save("flux", tmp_path_factory.mktemp("hub"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "flux"))


def edit(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_the_identity_is_of_the_content(original: Path, folder: Path):
    parts = ("transformer", "vae")
    assert hub.identity(folder, parts) == hub.identity(original, parts) == contract.load(folder).base_id
    assert hub.identity(folder, parts).startswith("blake2b:")
    edit(folder / "transformer" / WEIGHTS, lambda t: t["proj_out.bias"].add_(1e-3))
    assert hub.identity(folder, parts) != hub.identity(original, parts)
    assert hub.identity(folder, ("vae",)) == hub.identity(original, ("vae",))


def test_the_identity_of_a_large_file_reads_a_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "_SAMPLE_BYTES", 64)
    (tmp_path / "config.json").write_text("{}")
    data = bytearray(100_000)
    (tmp_path / "model.safetensors").write_bytes(data)
    before = hub.identity(tmp_path, ("",))
    places = hub._places(len(data))
    assert (len(places), places[0], places[-1]) == (16, 0, len(data) - 64)
    data[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert hub.identity(tmp_path, ("",)) != before
    (tmp_path / "model.safetensors").write_bytes(data[:-1] + b"\0\0")
    assert hub.identity(tmp_path, ("",)) != before  # another size


def test_pickled_weights_are_not_read(folder: Path):
    (folder / "vae" / WEIGHTS).rename(folder / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(NotFoundError, match="with safetensors") as caught:
        contract.load(folder)
    assert "safe_serialization" in str(caught.value.hint)


def test_a_missing_tensor_is_not_made_up(folder: Path):
    edit(folder / "transformer" / WEIGHTS, lambda t: t.pop("proj_out.bias"))
    with pytest.raises(IntegrityError, match=r"missing, first proj_out\.bias"):
        contract.load(folder)


@pytest.mark.parametrize("part", ["transformer", "vae"])
@pytest.mark.parametrize("keep", [0, 4, 1000, -10])
def test_a_truncated_file_is_damage(folder: Path, part: str, keep: int):
    path = folder / part / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(IntegrityError, match="not a "):
        contract.load(folder)


def test_a_damaged_text_encoder_is_found_when_it_is_needed(folder: Path):
    path = folder / "text_encoder_2" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    adapter = contract.load(folder)
    with pytest.raises(IntegrityError, match="not a T5EncoderModel"):
        adapter.encode(["a"])


def test_a_damaged_tokenizer_is_found_when_it_is_needed(folder: Path):
    (folder / "tokenizer_2" / "tokenizer.json").write_text("{")
    with pytest.raises(IntegrityError, match="not a "):
        contract.load(folder).encode(["a"])


@pytest.mark.parametrize(
    ("path", "revision", "error", "message"),
    [
        ("nobody/nothing", None, NotFoundError, "not in the local cache"),
        ("nobody/nothing", "v1", NotFoundError, "not in the local cache"),
        ("no such folder", None, NotFoundError, "nor is it a hub id"),
        ("../up", None, NotFoundError, "nor is it a hub id"),
        ("a/b/c", None, NotFoundError, "nor is it a hub id"),
        ("", None, NotFoundError, "not in the local cache"),  # the adapter's own default
    ],
)
def test_what_cannot_be_found(path: str, revision: str | None, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        load_model(ModelConfig(kind="sd3", path=path, revision=revision))


def test_a_folder_has_no_revision(folder: Path):
    with pytest.raises(ConfigError, match="has no revision"):
        contract.load(folder, revision="main")


def test_an_unknown_attention_backend(folder: Path):
    with pytest.raises(ConfigError, match="attention_backend 'fastest'"):
        contract.load(folder, attention_backend="fastest")
    contract.load(folder, attention_backend="native")


def test_loaded_models_are_frozen_and_in_the_wanted_precision(folder: Path):
    vae = hub.load(AutoencoderKL, folder / "vae", torch.bfloat16)
    assert {p.dtype for p in vae.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in vae.parameters())
    assert not vae.training
