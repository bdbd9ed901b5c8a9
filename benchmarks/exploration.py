"""Does exploring seeds on idle spot GPUs reach a score sooner, at equal hardware time?

Real weights, real images, real rewards, the real planner; only the clock is computed. There is one on-demand GPU
that trains and `--spot` GPUs beside it, and what an image and an update cost is measured in this very run (CPU
seconds of one thread). So an arm's iteration takes

    none, uniform, planner     finals / (1 + spot)  +  training          drafts are made during training, for free
    best_worst                 the same  +  its pool of drafts / (1 + spot), made with fresh weights before the finals

and the number of drafts of uniform and planner is what `spot` GPUs finish within the training time. Every arm may have
its own learning rate. A target that is not reached within `--iterations` counts as censored there.

    python benchmarks/exploration.py --seeds 5 --json
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from learning_curve import SEEDS_PER_ITERATION, Run

from spotlight import config as configuration
from spotlight.core.draft_cost import DraftSetting
from spotlight.core.explore import DraftPlanner
from spotlight.rl import data, params
from spotlight.rl.batch import TrainSample
from spotlight.rl.data import Prompt

BATCH = 8  # drafts a worker takes at once
NO_LIMIT_S = 1e9
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


@dataclass
class Costs:
    """CPU seconds: of an image with its reward, of an iteration's updates. Medians of what was measured."""

    image_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)

    def image(self) -> float:
        """Seconds of one image and its reward."""
        return statistics.median(self.image_s) if self.image_s else 0.01

    def train(self) -> float:
        """Seconds of an iteration's updates."""
        return statistics.median(self.train_s) if self.train_s else 1.0


class Arm(Run):
    """One seed of one policy."""

    def __init__(self, config: configuration.RunConfig, policy: str, spot: int, pool: int) -> None:
        super().__init__(config, drafts=0)
        self.policy, self.spot, self.pool, self.costs = policy, spot, pool, Costs()
        setting = DraftSetting(config.sampler.steps, config.model.height, config.model.width)
        self.planner = DraftPlanner(
            policy=policy, seed=config.seed, settings=(setting,), control_share=0.0, pool=pool, max_drafts=256
        )
        self.chosen: list[tuple[Prompt, int]] | None = None

    def draft(self, iteration: int, workers: int, budget_s: float) -> None:
        """Draft for `iteration` on a virtual clock with the weights that are in the model now; keep the choice."""
        prompts = self.prompts(iteration)
        by_row = {prompt.row: prompt for prompt in prompts}
        first = iteration * SEEDS_PER_ITERATION
        rows = [prompt.row for prompt in prompts]
        size = self.config.data.group_size
        self.planner.open(iteration, rows, [""] * len(rows), first, size, 0.0, budget_s, workers)
        free: list[tuple[float, int, list[Any]]] = [(0.0, worker, []) for worker in range(workers)]
        tie = workers
        while free:
            now, _, done = heapq.heappop(free)
            for row, seed, reward in done:
                self.planner.draft_done(row, seed, reward, self.costs.image(), now)
            if now >= budget_s:
                continue
            pairs = [(by_row[row], seed) for row, seed in self.planner.next_drafts(BATCH, now)]
            if not pairs:
                continue
            results = [(p.row, s, r) for (p, s), r in zip(pairs, self.timed(pairs)[1], strict=True)]
            heapq.heappush(free, (now + len(pairs) * self.costs.image(), tie, results))
            tie += 1
        plan = self.planner.close(budget_s)
        self.images_drafted += plan.stats.slots_used
        self.chosen = [(by_row[group.row], seed) for group in plan.groups for seed in group.seeds]

    def prompts(self, iteration: int) -> list[Prompt]:
        """The batch of an iteration."""
        n = self.config.data.prompts_per_iteration
        return data.batch(self.train_rows, iteration, n, self.config.seed)

    def timed(self, pairs: Sequence[tuple[Prompt, int]], keep: bool = False) -> tuple[Any, list[Any]]:
        """Make and score images; their cost is measured."""
        began = time.process_time()
        states = self.sample(pairs, self.trainer.sampler, keep=keep)
        values = self.rewards(pairs, states).values
        self.costs.image_s.append((time.process_time() - began) / len(pairs))
        return states, values

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration as the arm does it."""
        if self.policy == "best_worst":
            self.draft(iteration, 1 + self.spot, NO_LIMIT_S)
        first = iteration * SEEDS_PER_ITERATION
        pairs = self.chosen or [
            (prompt, first + j)
            for prompt in self.prompts(iteration)
            for j in range(self.config.data.group_size)
        ]
        states, values = self.timed(pairs, keep=True)
        batch = [TrainSample.of(s, p.text, r) for s, (p, _), r in zip(states, pairs, values, strict=True)]
        stale = self.trainer.trainable()
        began = time.process_time()
        metrics = self.trainer.train(batch, iteration)
        self.costs.train_s.append(time.process_time() - began)
        if self.policy in ("uniform", "planner"):
            with params.bound(self.adapter.transformer, stale):
                self.draft(iteration + 1, self.spot, self.costs.train())
        return metrics

    def iteration_s(self) -> float:
        """Hardware time of an iteration."""
        kept = self.config.data.prompts_per_iteration * self.config.data.group_size
        pool = self.config.data.prompts_per_iteration * self.pool if self.policy == "best_worst" else 0
        return (kept + pool) * self.costs.image() / (1 + self.spot) + self.costs.train()


def reached(curve: Sequence[dict[str, float]], target: float) -> float | None:
    """Iterations to the target, linearly between validations."""
    for before, after in pairwise(curve):
        if after["score"] >= target:
            rise = (target - before["score"]) / (after["score"] - before["score"])
            return before["iteration"] + max(rise, 0.0) * (after["iteration"] - before["iteration"])
    return None


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and the half width of its 95 % confidence interval (Student's t)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": round(mean, 3)}
    half = T_95.get(len(values), 2.0) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": round(mean, 3), "ci95": round(half, 3)}


def run_arm(options: argparse.Namespace, policy: str, seed: int) -> dict[str, Any]:
    """One curve, stopped once the highest target is reached."""
    lr = options.lr.get(policy, options.lr["all"])
    overrides = [f"seed={seed}", f"train.lr={lr}", f"iterations={options.iterations}", "eval_every=3"]
    arm = Arm(configuration.load("tiny", overrides), policy, options.spot, options.pool)
    curve: list[dict[str, float]] = []
    for point in arm.curve():
        curve.append({"iteration": point["iteration"], "score": point["score"]})
        if point["score"] >= max(options.targets):
            break
    found = {str(target): reached(curve, target) for target in options.targets}
    return {
        "policy": policy,
        "seed": seed,
        "lr": lr,
        "iteration_s": round(arm.iteration_s(), 4),
        "image_s": round(arm.costs.image(), 5),
        "train_s": round(arm.costs.train(), 4),
        "drafts_per_prompt": round(
            arm.images_drafted / max(curve[-1]["iteration"], 1) / arm.config.data.prompts_per_iteration, 1
        ),
        "iterations_to_target": found,
        "wall_s_to_target": {
            t: None if n is None else round(n * arm.iteration_s(), 2) for t, n in found.items()
        },
        "curve": [(int(point["iteration"]), point["score"]) for point in curve],
    }


def summarise(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Per policy: means with intervals over the seeds that reached a target, and how many did not."""
    out: dict[str, Any] = {}
    for policy in options.policies:
        mine = [row for row in rows if row["policy"] == policy]
        entry: dict[str, Any] = {"iteration_s": interval([row["iteration_s"] for row in mine])}
        for key in ("iterations_to_target", "wall_s_to_target"):
            entry[key] = {}
            for target in map(str, options.targets):
                hits = [row[key][target] for row in mine if row[key][target] is not None]
                entry[key][target] = {
                    **(interval(hits) if hits else {}),
                    "censored": len(mine) - len(hits),
                }
        entry["drafts_per_prompt"] = interval([row["drafts_per_prompt"] for row in mine])
        out[policy] = entry
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--spot", type=int, default=4, help="spot GPUs beside the one that trains")
    parser.add_argument("--pool", type=int, default=24, help="drafts of a prompt of best_worst")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.80, 0.85, 0.90])
    parser.add_argument("--policies", nargs="+", default=["none", "uniform", "best_worst", "planner"])
    parser.add_argument("--lr", nargs="+", default=["all=3e-4"], metavar="POLICY=LR")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    options = parser.parse_args()
    options.lr = {policy: float(lr) for policy, lr in (item.split("=") for item in options.lr)}
    torch.set_num_threads(1)
    rows = []
    for seed in range(options.seeds):
        for policy in options.policies:
            rows.append(run_arm(options, policy, seed))
            if not options.json:
                print(json.dumps(rows[-1]), flush=True)
    result = {"spot": options.spot, "pool": options.pool, "seeds": options.seeds, "lr": options.lr}
    print(json.dumps({**result, "policies": summarise(rows, options)}))


if __name__ == "__main__":
    main()
