"""Where each supported transformer class is cut for sequence parallelism: data, no behaviour.

A plan names the two token streams, image and text, at the places where they enter the blocks, and for every
kind of attention module the order in which the model joins them. One more model is one more entry. Checked
against diffusers 0.39: its own `_cp_plan` covers QwenImage and Flux with even lengths and has none for SD3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from spotlight.errors import ConfigError

Stream = Literal["image", "text"]
Joint = tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class SPPlan:
    """How to cut one transformer class.

    `inputs` maps an argument of a block to the stream it carries along dim 1; the first block shards the
    streams themselves, and every block what rides along (`every_block`). `outputs` maps a module to the
    streams along dim 0 of each of its outputs (rotary tables). `attention` maps the name of an attention
    module inside a block to the order of its tokens. `gather` is the last module that sees shards.
    """

    inputs: Mapping[str, Stream]
    attention: Mapping[str, Mapping[str, Joint]]  # list of blocks -> attention name -> order of tokens
    outputs: Mapping[str, tuple[Joint, ...]]
    every_block: Mapping[str, Stream]
    gather: str = "proj_out"
    blocks: str = "transformer_blocks"


_STREAMS: Mapping[str, Stream] = {"hidden_states": "image", "encoder_hidden_states": "text"}
_TEXT_FIRST: Joint = ("text", "image")

PLANS: Mapping[str, SPPlan] = {
    "QwenImageTransformer2DModel": SPPlan(
        inputs=_STREAMS,
        attention={"transformer_blocks": {"attn": _TEXT_FIRST}},
        outputs={"pos_embed": (("image",), ("text",))},
        every_block={"modulate_index": "image"},
    ),
    "FluxTransformer2DModel": SPPlan(
        inputs=_STREAMS,
        attention={
            "transformer_blocks": {"attn": _TEXT_FIRST},
            "single_transformer_blocks": {"attn": _TEXT_FIRST},
        },
        outputs={"pos_embed": (_TEXT_FIRST, _TEXT_FIRST)},
        every_block={},
    ),
    # attn2 is SD3.5's second attention over the image alone; blocks without one hold None there.
    "SD3Transformer2DModel": SPPlan(
        inputs=_STREAMS,
        attention={"transformer_blocks": {"attn": ("image", "text"), "attn2": ("image",)}},
        outputs={},
        every_block={},
    ),
}


def plan_for(model: nn.Module) -> SPPlan:
    """The plan of a model's class or of one of its bases. Raises ConfigError for an unknown class."""
    for cls in type(model).__mro__:
        if cls.__name__ in PLANS:
            return PLANS[cls.__name__]
    raise ConfigError(
        f"no sequence-parallel plan for {type(model).__name__}",
        hint=f"use sp_degree 1; plans exist for {', '.join(PLANS)}",
    )
