"""How well a draft ranks seeds: real drafts and finals of the tiny model, by weight lag, steps and sampler.

Per RL seed the model is trained once, and its weights are kept on the way. Finals are made at two versions, drafts
of the same random seeds and prompts with weights 0, 1, 5 and 20 versions older, or by another sampler, or in fewer
steps. A unit is a (RL seed, prompt) pair; both versions of a final are averaged in it.
The file of `--out` holds `setup` and `cells`, a list of

    final, draft     "kind-steps", as sde-4
    lag              how many versions the draft's weights are older than the final's
    rho              within-prompt Spearman correlation of the rewards: mean over units, low, high
    rho_edit         the same for the edit distance, which has only four values for three digits
    kept             variance of the finals of the k seeds picked on the draft, over that of k random seeds
    oracle           the same, picked on the finals themselves
    recovered        (picked - random) / (oracle - random)
    undefined        share of units whose drafts or finals were all equal, which have no rho

with 95 % bootstrap intervals over units. The variance of k random seeds is exact: on average over all subsets the
sample variance of k is that of all n.

    python benchmarks/draft_rank.py --rl-seeds 3
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_curve import Run
from planner import interval
from scipy.stats import rankdata

from spotlight import config as configuration
from spotlight.core.select import Floats, max_variance_subset
from spotlight.rl import data, params
from spotlight.rl.sampler import Sampler, rollout_sampler

KINDS = ("sde", "cps", "ode")
DRAFT_STEPS, FINAL_STEPS = (4, 3, 2), (4, 8)
LAGS = (0, 1, 5, 20)
VERSIONS = (20, 40)  # of the finals
K = 8
FIRST_SEED = 1 << 40  # seeds that training never uses
COLUMNS = ("rho", "rho_edit", "picked", "oracle", "random")


def spearman(a: Floats, b: Floats) -> Floats:
    """Rank correlation of each row of `a` and `b` (both (prompts, seeds)); NaN where a row has one value."""
    x, y = rankdata(a, axis=1), rankdata(b, axis=1)
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    scale = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return np.divide((x * y).sum(axis=1), scale, out=np.full(len(a), np.nan), where=scale > 0)


def contrast(draft: Floats, final: Floats, k: int) -> tuple[Floats, Floats, Floats]:
    """Per row, variance of `final` over k seeds: picked on the draft, picked on the final, and random."""
    picked = [row[max_variance_subset(guide.tolist(), k)] for guide, row in zip(draft, final, strict=True)]
    best = [row[max_variance_subset(row.tolist(), k)] for row in final]
    return np.var(picked, axis=1, ddof=1), np.var(best, axis=1, ddof=1), np.var(final, axis=1, ddof=1)


def measure(draft: Floats, final: Floats) -> Floats:
    """The `COLUMNS` of every prompt, (prompts, 5); draft and final are (soft or edit, prompts, seeds)."""
    return np.stack(
        [
            spearman(draft[0], final[0]),
            spearman(draft[1], final[1]),
            *contrast(draft[0], final[0], K),
        ],
        axis=1,
    )


def over(a: Floats, b: Floats) -> float:
    return float(a.mean() / b.mean())


def recovered(picked: Floats, oracle: Floats, random: Floats) -> float:
    return over(picked - random, oracle - random)


def summary(units: Floats) -> dict[str, Any]:
    """Statistics of one cell from its units, (units, 5)."""
    column = dict(zip(COLUMNS, units.T, strict=True))
    rho, edit = (column[name][np.isfinite(column[name])] for name in ("rho", "rho_edit"))
    picked, oracle, random = (column[name] for name in ("picked", "oracle", "random"))
    return {
        "rho": interval(np.mean, rho),
        "rho_edit": interval(np.mean, edit),
        "kept": interval(over, picked, random),
        "oracle": interval(over, oracle, random),
        "recovered": interval(recovered, picked, oracle, random),
        "undefined": round(1 - len(rho) / len(units), 3),
    }


class Gallery:
    """Rewards of the same prompts and seeds under the weights and samplers asked for, each made once."""

    def __init__(self, run: Run, prompts: int, seeds: int, snapshots: dict[int, params.Weights]) -> None:
        rows = data.batch(run.train_rows, VERSIONS[-1], prompts, run.config.seed)
        self.pairs = [(row, FIRST_SEED + j) for row in rows for j in range(seeds)]
        self.run, self.shape, self.snapshots = run, (2, prompts, seeds), snapshots
        self.made: dict[tuple[int, str, int], Floats] = {}

    def rewards(self, version: int, kind: str, steps: int) -> Floats:
        """(soft or edit, prompts, seeds)."""
        key = version, kind, steps
        if key not in self.made:
            with params.bound(self.run.adapter.transformer, self.snapshots[version]):
                states = self.run.sample(self.pairs, self.sampler(kind, steps), keep=False)
            scores = self.run.rewards(self.pairs, states)
            both = [scores.values, scores.info["ocr_soft.edit"]]
            self.made[key] = np.array(both, dtype=np.float64).reshape(self.shape)
        return self.made[key]

    def sampler(self, kind: str, steps: int) -> Sampler:
        """As the recipe's, of that kind."""
        return rollout_sampler(self.run.config.sampler.model_copy(update={"kind": kind}), steps=steps)


def train(run: Run) -> dict[int, params.Weights]:
    """The weights by version, wherever a draft or a final needs them."""
    needed = {version - lag for version in VERSIONS for lag in LAGS}
    snapshots = {}
    for version in range(max(needed) + 1):
        if version in needed:
            snapshots[version] = run.trainer.trainable()
        if version < max(needed):
            run.iterate(version)
    return snapshots


def compared() -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """(final, draft) pairs, each (kind, steps): any sampler at equal steps, and its own kind with fewer."""
    finals, drafts = itertools.product(KINDS, FINAL_STEPS), list(itertools.product(KINDS, DRAFT_STEPS))
    return [
        (final, draft)
        for final in finals
        for draft in drafts
        if final[0] == draft[0] or final[1] == draft[1] == DRAFT_STEPS[0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rl-seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=24, help="random seeds of a prompt")
    parser.add_argument("--drafts", type=int, default=16, help="drafts per prompt in training")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "draft_rank.json")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    units: dict[tuple[str, str, int], list[Floats]] = {}
    for rl_seed in range(options.rl_seeds):
        run = Run(configuration.load("tiny", [f"seed={rl_seed}"]), options.drafts)
        gallery = Gallery(run, options.prompts, options.seeds, train(run))
        for (final, draft), lag in itertools.product(compared(), LAGS):
            both = [
                measure(gallery.rewards(version - lag, *draft), gallery.rewards(version, *final))
                for version in VERSIONS
            ]
            name = "{}-{}".format(*final), "{}-{}".format(*draft), lag
            units.setdefault(name, []).append(np.mean(both, axis=0))
        if not options.json:
            print(f"RL seed {rl_seed} done", flush=True)
        cells = [
            {"final": final, "draft": draft, "lag": lag, **summary(np.concatenate(parts))}
            for (final, draft, lag), parts in units.items()
        ]
        setup = {"rl_seeds": rl_seed + 1, "prompts": options.prompts, "seeds": options.seeds, "k": K}
        setup |= {"versions": VERSIONS, "train_drafts": options.drafts, "lr": run.config.train.lr}
        options.out.write_text(json.dumps({"setup": setup, "cells": cells}, indent=1) + "\n")
    print(json.dumps({**setup, "cells": len(cells)}))


if __name__ == "__main__":
    main()
