"""The embedded models: SD3 transformers of 1.3 M parameters that draw digits (`tiny`) or shapes (`tiny-shapes`).

There is no VAE: a latent is the picture in [-1, 1], of 16x32 grey or 24x24 coloured pixels. The text side is an
embedding per character or word. A checkpoint is a folder in diffusers' layout with safetensors in it, whose own
configuration says which channels and vocabulary it has; `benchmarks/pretrain_tiny.py` made those in `assets`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin, SD3Transformer2DModel
from diffusers.configuration_utils import register_to_config
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from spotlight.config import ModelConfig
from spotlight.errors import ConfigError, DataError, IntegrityError, NotFoundError
from spotlight.rl.data import written_text
from spotlight.rl.models import DTYPES, Conditioning, configure, dtype_of

WEIGHTS = "diffusion_pytorch_model.safetensors"
DIGITS = tuple("0123456789")


class SymbolEncoder(ModelMixin, ConfigMixin):
    """An embedding per symbol and slot: (B, slots) ids to (B, slots, dim) and pooled (B, dim).

    Symbols are the characters of the text that a prompt quotes (or of the whole prompt), or with `words` the
    words of the prompt.
    """

    @register_to_config
    def __init__(
        self, vocabulary: Sequence[str] = DIGITS, slots: int = 4, dim: int = 32, words: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(vocabulary) + 2, dim)  # and `no symbol`, `no prompt`
        self.position = nn.Parameter(torch.randn(slots, dim) * 0.3)
        self.pool = nn.Linear(slots * dim, dim)
        self._place = {symbol: place for place, symbol in enumerate(vocabulary)}

    def ids(self, prompts: Sequence[str]) -> Tensor:
        """(B, slots); the empty text is the unconditional prompt. Raises DataError: it cannot be drawn."""
        none, unconditional = len(self._place), len(self._place) + 1
        rows = []
        for prompt in prompts:
            if not prompt.strip():
                rows.append([unconditional] * self.config.slots)
                continue
            known = [self._place[symbol] for symbol in self._symbols(prompt)]
            rows.append(known + [none] * (self.config.slots - len(known)))
        return torch.tensor(rows, dtype=torch.long).reshape(-1, self.config.slots)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B, slots, dim) and their pooled projection (B, dim)."""
        embeds = self.embedding(ids) + self.position
        return embeds, self.pool(embeds.flatten(1))

    def _symbols(self, prompt: str) -> Sequence[str]:
        words, slots = self.config.words, self.config.slots
        symbols = prompt.lower().split() if words else written_text(prompt) or prompt.strip()
        unknown = list(dict.fromkeys(symbol for symbol in symbols if symbol not in self._place))
        if not unknown and len(symbols) <= slots:
            return symbols
        kind, joint = ("words", ", ") if words else ("characters", "")
        fault = f"it does not know {joint.join(unknown)[:40]!r}" if unknown else f"{len(symbols)} {kind}"
        raise DataError(
            f"the tiny model cannot draw {prompt[:60]!r}: {fault}",
            hint=f"a prompt is {'' if words else '(or quotes) '}1 to {slots} {kind} of "
            f"{joint.join(self._place)}",
        )


def build(
    encoder: SymbolEncoder | None = None, *, channels: int = 1
) -> tuple[SD3Transformer2DModel, SymbolEncoder]:
    """Untrained transformer and text encoder in the embedded checkpoints' size, from torch's random state."""
    encoder = encoder or SymbolEncoder()
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=4,
        in_channels=channels,
        out_channels=channels,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=24,
        joint_attention_dim=encoder.config.dim,
        caption_projection_dim=96,
        pooled_projection_dim=encoder.config.dim,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    return transformer, encoder


class TinyAdapter:
    """See `ModelAdapter`."""

    name = "tiny"
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("net.0.proj", "net.2"),
    )

    def __init__(self, transformer: nn.Module, encoder: SymbolEncoder, base_id: str) -> None:
        self.transformer = transformer
        self.base_id = base_id
        self._encoder = encoder.requires_grad_(False)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """(channels, height, width): the identity VAE."""
        config = self.transformer.config
        largest = config.patch_size * config.pos_embed_max_size
        if height % config.patch_size or width % config.patch_size or max(height, width) > largest:
            raise ConfigError(
                f"the tiny model cannot draw {height}x{width} pixels",
                hint=f"model.height and model.width: multiples of {config.patch_size}, at most {largest}",
            )
        return (config.in_channels, height, width)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """See `ModelAdapter.encode`."""
        embeds, pooled = self._encoder(self._encoder.ids(prompts).to(self._encoder.device))
        return Conditioning({"embeds": embeds, "pooled": pooled})

    def velocity(
        self,
        latents: Tensor,
        t: Tensor,
        cond: Conditioning,
        *,
        negative: Conditioning | None = None,
        cfg: float = 1.0,
    ) -> Tensor:
        """See `ModelAdapter.velocity`."""
        if negative is None or cfg == 1:
            return self._forward(latents, t, cond)
        both = self._forward(torch.cat([latents] * 2), torch.cat([t] * 2), Conditioning.cat([negative, cond]))
        without, with_prompt = both.chunk(2)
        return without + cfg * (with_prompt - without)

    def _forward(self, latents: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        dtype = dtype_of(self.transformer)
        return self.transformer(
            hidden_states=latents.to(dtype),
            encoder_hidden_states=cond["embeds"].to(dtype),
            pooled_projections=cond["pooled"].to(dtype),
            timestep=t * 1000,
            return_dict=False,
        )[0].float()

    def decode(self, latents: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1]."""
        return (latents.float().clamp(-1, 1) + 1) / 2


def load(config: ModelConfig) -> TinyAdapter:
    """A checkpoint at `config.path`, or `builtin:NAME` of those in the package; empty: `builtin:tiny`."""
    path = "builtin:tiny" if config.path is None else config.path
    if not path.startswith("builtin:"):
        return _load_folder(Path(path), config)
    name = path.removeprefix("builtin:")
    with resources.as_file(resources.files("spotlight") / "assets") as assets:
        names = sorted(folder.name for folder in assets.iterdir())
        if name not in names:
            raise NotFoundError(
                f"no built-in checkpoint {name[:80]!r}", hint=f"there are builtin:{', builtin:'.join(names)}"
            )
        return _load_folder(assets / name, config)


def save(folder: Path, transformer: SD3Transformer2DModel, encoder: SymbolEncoder) -> None:
    """Write a checkpoint in fp16: model_index.json, transformer/, text_encoder/."""
    folder.mkdir(parents=True, exist_ok=True)
    transformer.half().save_pretrained(folder / "transformer")
    encoder.half().save_pretrained(folder / "text_encoder")
    index = {
        "_class_name": "TinyPipeline",
        "text_encoder": ["spotlight.rl.models.tiny", "SymbolEncoder"],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def _load_folder(folder: Path, config: ModelConfig) -> TinyAdapter:
    transformer = _load_part(SD3Transformer2DModel, folder / "transformer")
    encoder = _load_part(SymbolEncoder, folder / "text_encoder")
    digest = hashlib.blake2b(digest_size=16)
    for part in ("transformer", "text_encoder"):
        digest.update((folder / part / WEIGHTS).read_bytes())
    nn.Module.to(transformer, DTYPES[config.dtype])  # diffusers' own `to` warns about modules that it has not
    configure(transformer, config)
    return TinyAdapter(transformer, encoder, f"blake2b:{digest.hexdigest()}")


def _load_part(kind: Any, folder: Path) -> Any:
    """Build from config.json and bind every tensor: diffusers itself fills gaps with random numbers."""
    if not (folder / WEIGHTS).is_file() or not (folder / "config.json").is_file():
        raise NotFoundError(
            f"no tiny checkpoint: {folder} holds no config.json with {WEIGHTS}", hint="see model.path"
        )
    try:
        part = kind.from_config(json.loads((folder / "config.json").read_bytes()))
        part.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    except (SafetensorError, ValueError, TypeError, RuntimeError) as error:
        raise IntegrityError(f"{folder}: damaged or not a tiny checkpoint ({str(error)[:300]})") from error
    return part
