"""A trainer's changing state as named tensors and JSON, for checkpoints without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spotlight.errors import IntegrityError
from spotlight.rl.params import placed, whole

if TYPE_CHECKING:
    from spotlight.rl.train_step import Trainer

FORMAT = 1


def pack(trainer: Trainer, *, keep: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """CPU copies: `weights/`, `average/`, `old/`, `base/` and `optimizer/<moment>/` + parameter name.

    Shards are put together one tensor after the other, with all processes taking part; those with `keep`
    False hand over their shards and end up with no tensors.
    """
    live = dict(_weights(trainer))
    for name, parameter in trainer.parameters.items():
        for moment, value in trainer.optimizer.state.get(parameter, {}).items():
            live[f"optimizer/{moment}/{name}"] = torch.as_tensor(value)
    tensors = {}
    for name, tensor in live.items():
        full = whole(tensor.detach())
        if keep:
            tensors[name] = full.cpu().clone()
    return tensors, {"format": FORMAT, "bad_in_a_row": trainer.bad_in_a_row}


@torch.no_grad()
def unpack(trainer: Trainer, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Put a packed state back. Raises IntegrityError before anything is changed."""
    targets = _weights(trainer)
    moments = {name: t for name, t in tensors.items() if name.startswith("optimizer/")}
    _check(targets, moments, tensors, trainer, meta)
    for name, target in targets.items():
        target.copy_(placed(tensors[name], target))
    trainer.bad_in_a_row = int(meta["bad_in_a_row"])
    trainer.optimizer.state.clear()
    for key, value in moments.items():
        _, moment, name = key.split("/", 2)
        parameter = trainer.parameters[name]
        # Adam's step counter stays on the CPU; the moments lie beside their parameter
        kept = value.clone() if moment == "step" else placed(value.to(parameter.device), parameter).clone()
        trainer.optimizer.state[parameter][moment] = kept


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    sets: dict[str, Mapping[str, Tensor] | None] = {
        "weights": trainer.parameters,
        "average": trainer.average,
        "old": trainer.old,
        "base": trainer.base,
    }
    return {f"{kind}/{name}": t for kind, group in sets.items() if group for name, t in group.items()}


def _check(
    targets: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    trainer: Trainer,
    meta: Mapping[str, Any],
) -> None:
    if meta.get("format") != FORMAT or type(meta.get("bad_in_a_row")) is not int:
        raise IntegrityError(f"trainer state of format {meta.get('format')!r}, this version reads {FORMAT}")
    problems = [f"{name} is missing" for name in sorted(targets.keys() - tensors.keys())]
    problems += [f"{name} is unknown" for name in sorted(tensors.keys() - targets.keys() - moments.keys())]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(target.shape)}"
        for name, target in targets.items()
        if name in tensors and tensors[name].shape != target.shape
    ]
    problems += [f"{key} belongs to no parameter" for key in moments if not _fits(key, moments[key], trainer)]
    if problems:
        raise IntegrityError(f"the trainer state does not fit this run: {'; '.join(problems[:3])}")


def _fits(key: str, value: Tensor, trainer: Trainer) -> bool:
    _, _, rest = key.partition("/")
    moment, _, name = rest.partition("/")
    parameter = trainer.parameters.get(name)
    return parameter is not None and (moment == "step" or value.shape == parameter.shape)
