"""The numbers of a run: what each is called, its unit, and the one place they are written from.

`metrics.jsonl` is the truth: written at once, in the run's own thread. Every other sink is fed through a
bounded queue and may lose records; how many is counted and shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotlight.observe import jsonl
from spotlight.observe.redact import Redactor
from spotlight.observe.sinks import Background, TensorBoardSink, WandbSink

JSONL_NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Metric:
    """One number: its unit and what it tells."""

    unit: str
    help: str


# Names users of this field look for; anything else (`reward/NAME` for instance) passes through unlisted.
METRICS: Mapping[str, Metric] = {
    "reward_mean": Metric("1", "mean reward of the finals of the iteration"),
    "reward_std": Metric("1", "standard deviation of the rewards, all groups together"),
    "score": Metric("1", "held-out score of the averaged weights"),
    "exact": Metric("share", "share of held-out prompts with a perfect score"),
    "loss": Metric("1", "mean loss of the iteration's updates"),
    "kl": Metric("nat", "divergence from the base model"),
    "ratio_dev": Metric("1", "largest |ratio - 1| at the first update; 0 when on-policy"),
    "clip_fraction": Metric("share", "share of samples whose ratio was clipped"),
    "grad_norm": Metric("1", "gradient norm before clipping"),
    "lr": Metric("1", "learning rate"),
    "images_per_s": Metric("images/s", "finals made per second of roll-out"),
    "drafts": Metric("images", "drafts finished in this iteration"),
    "zero_variance_groups": Metric("groups", "groups whose rewards were all equal: skipped"),
    "dropped_samples": Metric("samples", "samples dropped: failed reward or non-finite"),
    "skipped_steps": Metric("steps", "optimiser steps passed over"),
    "rho": Metric("1", "rank correlation of draft and final reward"),
    "variance_gain": Metric("1", "kept reward variance against the random control"),
    "spot_busy_share": Metric("share", "share of the training time in which spot nodes worked"),
    "weights_version": Metric("1", "version the iteration's finals were made with"),
    "preemptions": Metric("nodes", "nodes that their provider took so far"),
    "explore_s": Metric("s", "wall time waited for drafts"),
    "roll_out_s": Metric("s", "wall time of the roll-out"),
    "score_s": Metric("s", "wall time spent waiting for rewards"),
    "train_s": Metric("s", "wall time of the updates"),
    "publish_s": Metric("s", "wall time of publishing weights"),
    "eval_s": Metric("s", "wall time of the validation"),
    "wall_s": Metric("s", "wall time of the iteration"),
    "usd": Metric("$", "cost of the run so far"),
}


class Recorder:
    """Writes each record to the JSONL file first and then offers it to the other sinks."""

    def __init__(
        self, truth: jsonl.JsonLines, others: Iterable[Background] = (), redactor: Redactor | None = None
    ) -> None:
        self._truth = truth
        self._others = tuple(others)
        self._redactor = redactor or Redactor()

    def record(self, kind: str, iteration: int, values: Mapping[str, Any], at_s: float) -> None:
        """Write the numbers of an iteration or a validation at Unix time `at_s`. Never raises or waits."""
        row = self._redactor.scrub({"at_s": at_s, "kind": kind, "iteration": iteration, **values})
        row = jsonl.finite(row)
        self._truth.append(row)
        for sink in self._others:
            sink.write(row)

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Flush every sink, each within `timeout_s`; return what went wrong, in words."""
        self._truth.close()
        problems = (
            [f"{self._truth.lost} metric records lost: {self._truth.problem}"] if self._truth.lost else []
        )
        for sink in self._others:
            problems += sink.close(timeout_s)
        return problems


def open_recorder(
    folder: Path, *, run: str, config: Mapping[str, Any], wandb_project: str | None = None
) -> Recorder:
    """Open the sinks of a run folder: JSONL and TensorBoard always, W&B when a project is named."""
    redactor = Redactor.from_environment()
    others = [Background("tensorboard", lambda: TensorBoardSink(folder / "tensorboard"))]
    if wandb_project:
        scrubbed = redactor.scrub(config)
        others.append(Background("wandb", lambda: WandbSink(folder, wandb_project, run, scrubbed)))
    return Recorder(jsonl.JsonLines(folder / JSONL_NAME), others, redactor)


def read(folder: Path) -> list[dict[str, Any]]:
    """All metric records of a run, oldest first."""
    return list(jsonl.read(folder / JSONL_NAME))
