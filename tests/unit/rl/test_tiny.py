"""The tiny adapter: the shipped checkpoint, the adapter protocol, and bad folders and prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from safetensors.torch import load_file, save_file

from spotlight.config import ModelConfig
from spotlight.config import load as load_recipe
from spotlight.errors import ConfigError, DataError, IntegrityError, NotFoundError
from spotlight.rl import data
from spotlight.rl.models import ModelAdapter, load_model, tiny
from spotlight.rl.rewards import load_reward

ALL_ASSETS = Path(tiny.__file__).parents[2] / "assets"
ASSETS = ALL_ASSETS / "tiny"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    return load_model(ModelConfig())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ASSETS, tmp_path / "checkpoint"))


def latents(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 16, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["tiny", "tiny-shapes"])
def test_a_shipped_checkpoint_is_small_and_complete(name: str) -> None:
    files = [path for path in (ALL_ASSETS / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 3_000_000
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    adapter = load_model(ModelConfig(path=f"builtin:{name}"))
    assert isinstance(adapter, ModelAdapter)
    assert isinstance(adapter.transformer, SD3Transformer2DModel)
    assert sum(p.numel() for p in adapter.transformer.parameters()) == pytest.approx(1.3e6, rel=0.05)
    assert {p.dtype for p in adapter.transformer.parameters()} == {torch.float32}


def test_diffusers_itself_loads_the_folder() -> None:
    loaded = SD3Transformer2DModel.from_pretrained(ASSETS / "transformer", torch_dtype=torch.float32)
    ours = load_model(ModelConfig()).transformer.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("recipe", "low", "high"), [("tiny", 0.4, 0.8), ("tiny-geneval", 0.3, 0.6)], ids=["tiny", "tiny-geneval"]
)
def test_half_of_what_a_base_draws_is_right(recipe: str, low: float, high: float) -> None:
    """Euler steps by diffusers' own scheduler on held-out prompts: there is something to learn, and to reward."""
    config = load_recipe(recipe)
    adapter, prompts = load_model(config.model), data.load(config.data.validation)[:64]
    texts = [prompt.text for prompt in prompts]
    shape = adapter.latent_shape(config.model.height, config.model.width)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    x, cond = torch.randn(64, *shape, generator=torch.Generator().manual_seed(0)), adapter.encode(texts)
    with torch.no_grad():
        for sigma, timestep in zip(scheduler.sigmas, scheduler.timesteps, strict=False):
            v = adapter.velocity(x, sigma.expand(len(texts)), cond)
            x = scheduler.step(v, timestep, x, return_dict=False)[0]
    reward = load_reward(config.reward.held_out)
    scores = reward.score(adapter.decode(x), texts, [prompt.metadata for prompt in prompts]).values
    assert low < sum(scores) / len(scores) < high


def test_shapes_and_ranges(adapter: ModelAdapter) -> None:
    assert adapter.latent_shape(16, 32) == (1, 16, 32)
    cond = adapter.encode(["703", "7"])
    assert cond.size == 2
    v = adapter.velocity(latents(2), torch.tensor([1.0, 0.25]), cond)
    assert (v.shape, v.dtype) == ((2, 1, 16, 32), torch.float32)
    image = adapter.decode(torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0]))
    assert image.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_guidance_is_the_extrapolation_from_the_unconditional_velocity(adapter: ModelAdapter) -> None:
    x, t = latents(2), torch.tensor([0.5, 0.5])
    cond, negative = adapter.encode(["703", "118"]), adapter.encode(["", ""])
    with torch.no_grad():
        plain, without = adapter.velocity(x, t, cond), adapter.velocity(x, t, negative)
        guided = adapter.velocity(x, t, cond, negative=negative, cfg=3.0)
        unguided = adapter.velocity(x, t, cond, negative=negative, cfg=1.0)
    torch.testing.assert_close(guided, without + 3 * (plain - without), atol=1e-5, rtol=1e-5)
    assert torch.equal(unguided, plain)
    assert not torch.allclose(plain, without, atol=1e-2)


def test_the_text_side_takes_no_gradient_and_the_transformer_does(adapter: ModelAdapter) -> None:
    cond = adapter.encode(["703"])
    assert not cond["embeds"].requires_grad
    adapter.velocity(latents(1), torch.tensor([0.5]), cond).sum().backward()
    assert all(p.grad is not None for p in adapter.transformer.parameters() if p.requires_grad)
    adapter.transformer.zero_grad(set_to_none=True)


def test_a_prompt_is_drawn_by_what_it_quotes(adapter: ModelAdapter) -> None:
    plain, quoted, single = (
        adapter.encode([p])["embeds"] for p in ("703", 'a sign "703"', "a cat with '703'")
    )
    assert torch.equal(plain, quoted)
    assert torch.equal(plain, single)


@pytest.mark.parametrize("prompt", ["abc", "12345", "7 3", "٣", "７", "🙂", "a photo of a cat", "-1"])
def test_what_it_cannot_draw_is_a_data_error(adapter: ModelAdapter, prompt: str) -> None:
    with pytest.raises(DataError, match="the tiny model cannot draw") as caught:
        adapter.encode(["703", prompt])
    assert "0123456789" in str(caught.value.hint)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> ModelAdapter:
    """Another model of the kind: its vocabulary, words and channels come from the folder alone."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("words")
    encoder = tiny.SymbolEncoder(["a", "red", "cat"], slots=3, dim=16, words=True)
    tiny.save(folder, *tiny.build(encoder, channels=3))
    return load_model(ModelConfig(path=str(folder)))


def test_a_folder_says_what_its_model_reads_and_draws(words: ModelAdapter) -> None:
    assert words.latent_shape(24, 24) == (3, 24, 24)
    cond = words.encode(["a red cat", "cat  a", "A Red CAT", ""])
    assert torch.equal(cond["embeds"][0], cond["embeds"][2])
    assert not torch.equal(cond["embeds"][0], cond["embeds"][1])
    v = words.velocity(torch.zeros(4, 3, 24, 24), torch.full((4,), 0.5), cond)
    assert v.shape == (4, 3, 24, 24)
    assert words.decode(v).shape == (4, 3, 24, 24)


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ("a blue dog", "it does not know 'blue, dog'"),
        ("a red a red", "4 words"),
        ('a "red" cat', "'\"red\"'"),
    ],
)
def test_words_it_cannot_draw_are_a_data_error(words: ModelAdapter, prompt: str, fault: str) -> None:
    with pytest.raises(DataError, match="the tiny model cannot draw") as caught:
        words.encode([prompt])
    assert fault in str(caught.value)
    assert "1 to 3 words of a, red, cat" in str(caught.value.hint)


def test_a_built_in_checkpoint_that_is_none_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="no built-in checkpoint 'tyni'") as caught:
        load_model(ModelConfig(path="builtin:tyni"))
    assert "builtin:tiny" in str(caught.value.hint)


@pytest.mark.parametrize(("height", "width"), [(16, 30), (18, 32), (64, 32), (16, 36)])
def test_a_size_it_cannot_draw_is_a_config_error(adapter: ModelAdapter, height: int, width: int) -> None:
    with pytest.raises(ConfigError, match=f"{height}x{width}"):
        adapter.latent_shape(height, width)


def test_lower_precision_and_checkpointing_stay_close(adapter: ModelAdapter) -> None:
    x, t, cond = latents(2), torch.tensor([0.9, 0.4]), adapter.encode(["703", "118"])
    half = load_model(ModelConfig(dtype="bf16", gradient_checkpointing=True))
    with torch.no_grad():
        v = half.velocity(x, t, cond)
        torch.testing.assert_close(v, adapter.velocity(x, t, cond), atol=0.1, rtol=0.1)
    assert v.dtype == torch.float32


def test_an_attention_backend_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="attention_backend 'flsh'"):
        load_model(ModelConfig(attention_backend="flsh"))


def test_the_base_id_follows_the_weights(adapter: ModelAdapter, checkpoint: Path) -> None:
    assert load_model(ModelConfig(path=str(checkpoint))).base_id == adapter.base_id
    path = checkpoint / "text_encoder" / WEIGHTS
    tensors = load_file(path)
    tensors["position"] = tensors["position"] + 1
    save_file(tensors, path)
    assert load_model(ModelConfig(path=str(checkpoint))).base_id != adapter.base_id


def test_save_then_load_is_the_same_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformer, encoder = tiny.build(tiny.SymbolEncoder("xyz"))
    tiny.save(tmp_path / "new", transformer, encoder)
    loaded = load_model(ModelConfig(path=str(tmp_path / "new")))
    for name, tensor in transformer.state_dict().items():
        assert torch.equal(tensor.float(), loaded.transformer.state_dict()[name])
    assert loaded.encode(["zyx"]).size == 1


def truncate(folder: Path) -> None:
    path = folder / "transformer" / WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])


def drop_a_tensor(folder: Path) -> None:
    path = folder / "transformer" / WEIGHTS
    tensors = load_file(path)
    del tensors["proj_out.weight"]
    save_file(tensors, path)


def other_shape(folder: Path) -> None:
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 3}))


def no_json(folder: Path) -> None:
    (folder / "text_encoder" / "config.json").write_text("{")


@pytest.mark.parametrize("damage", [truncate, drop_a_tensor, other_shape, no_json])
def test_a_damaged_checkpoint_is_refused(checkpoint: Path, damage: object) -> None:
    damage(checkpoint)  # type: ignore[operator]
    with pytest.raises(IntegrityError, match="damaged or not a tiny checkpoint"):
        load_model(ModelConfig(path=str(checkpoint)))


def test_a_folder_without_a_checkpoint_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no tiny checkpoint"):
        load_model(ModelConfig(path=str(tmp_path / "nowhere")))
