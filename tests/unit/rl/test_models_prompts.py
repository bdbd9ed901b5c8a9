"""Prompt embeddings: made once, kept on disk, never mixed up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import adapter_contract as contract

from spotlight.rl.models.prompts import PromptEncoder


class Counting:
    """An encoder that tells how often it was made and asked."""

    def __init__(self) -> None:
        self.made, self.asked = 0, []

    def make(self):
        self.made += 1
        return self.embed

    def embed(self, prompt: str) -> dict[str, torch.Tensor]:
        self.asked.append(prompt)
        values = torch.tensor([[float(ord(c)), 1.0] for c in prompt or " "], dtype=torch.bfloat16)
        return {"embeds": values, "mask": torch.ones(len(values), dtype=torch.bool)}


def encoder(folder: Path | None, counting: Counting, key: str = "k") -> PromptEncoder:
    return PromptEncoder(counting.make, lambda: key, folder)


def test_what_is_on_disk_needs_no_encoder(tmp_path: Path):
    first, second = Counting(), Counting()
    expected = encoder(tmp_path, first)(["a cat", "", "a cat", "猫"])
    found = encoder(tmp_path, second)(["a cat", "", "a cat", "猫"])
    assert (first.made, first.asked) == (1, ["a cat", "", "猫"])
    assert (second.made, second.asked) == (0, [])
    for name in ("embeds", "mask"):
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name])


def test_another_key_is_another_embedding(tmp_path: Path):
    encoder(tmp_path, Counting())(["a"])
    other = Counting()
    encoder(tmp_path, other, key="another model")(["a"])
    assert other.asked == ["a"]


@pytest.mark.parametrize("damage", [b"", b"\x00" * 100, None])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: bytes | None):
    expected = encoder(tmp_path, Counting())(["a"])
    [file] = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] if damage is None else damage)
    again = Counting()
    assert torch.equal(encoder(tmp_path, again)(["a"])["embeds"], expected["embeds"])
    assert again.asked == ["a"]
    after = Counting()
    encoder(tmp_path, after)(["a"])
    assert after.asked == []


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    counting = Counting()
    subject = encoder(blocker, counting)
    assert subject(["a"]).size == 1
    assert subject(["a"]).size == 1
    assert counting.asked == ["a"]  # remembered in memory all the same


def test_nothing_is_left_behind(tmp_path: Path):
    encoder(tmp_path, Counting())([str(i) for i in range(20)])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 20
    assert all(path.suffix == ".safetensors" for path in files)


@pytest.mark.parametrize("kind", ["sd3", "qwen_image"])
def test_adapters_share_a_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, cache = contract.save(kind, tmp_path), str(tmp_path / "cache")
    plain = contract.load(folder).encode(contract.PROMPTS)
    contract.load(folder, embedding_cache=cache).encode(contract.PROMPTS)
    reader = contract.load(folder, embedding_cache=cache)
    monkeypatch.setattr(reader.encode, "_make", lambda: pytest.fail("the encoders were loaded"))
    kept = reader.encode(contract.PROMPTS)
    assert all(torch.equal(kept[name], plain[name]) for name in plain.tensors)
    other = contract.load(folder, embedding_cache=cache, text_tokens=contract.TOKENS - 1)
    monkeypatch.setattr(other.encode, "_make", lambda: pytest.fail("asked"))
    with pytest.raises(pytest.fail.Exception, match="asked"):  # another length, another embedding
        other.encode(contract.PROMPTS)
