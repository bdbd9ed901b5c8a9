"""Does exploring seeds on idle spot GPUs reach a score sooner, at equal hardware time?

Real weights, real images, real rewards, the real planner; only the clock is computed. One on-demand GPU trains and
`--spot` GPUs stand beside it. What an image (with its reward) and an iteration's updates cost is measured once, in CPU
seconds of one thread, and is the same for every arm. An iteration takes, all GPUs making images,

    none, uniform, planner    finals / (1 + spot) + training     drafts are made while training, for nothing
    best_worst                pool / (1 + spot) + training       the pool has fresh weights, so its best are the finals
    on-demand only            finals + training                  `none` without any spot GPU

and uniform and planner draft what `spot` GPUs finish within 90 % of the training time. An arm is a list of overrides
of the recipe, so every arm has its own learning rate; SETTINGS holds the best found on other seeds than those reported.

A row per arm and seed is appended to `--rows`; what is there is not run again, only summed up. A target not reached
within `--horizon` hardware seconds is censored: means then are lower bounds, and so are ratios to a censored baseline.

    python benchmarks/exploration.py --out benchmarks/results/exploration.json
    python benchmarks/exploration.py --seeds 100 --rows /tmp/tune.jsonl --arms a=explore.policy=none,train.lr=6e-4

What the summary holds is said in time_to_target.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from learning_curve import SEEDS_PER_ITERATION, Run
from time_to_target import Row, plot, short, summarise

from spotlight import config as configuration
from spotlight.config import RunConfig
from spotlight.core.draft_cost import DraftSetting
from spotlight.core.explore import DraftPlanner
from spotlight.core.select import best_worst
from spotlight.rl import data, params
from spotlight.rl.batch import TrainSample
from spotlight.rl.data import Prompt

BATCH = 8  # drafts a worker pulls at once
POOL = 4  # pool of best_worst per seed kept, as Sol-RL's 24 in 96
MOST_DRAFTS = 256  # of a prompt
USED = 0.9  # of the training time: drafts are planned for a low quantile of it (docs/planner.md)
COLLAPSED = 0.05  # below the base by this much, there is no point in going on
SETTINGS = {
    "none": "explore.policy=none,algorithm.normalise=batch,train.lr=3e-4",
    "uniform": "explore.policy=uniform,algorithm.normalise=batch,train.lr=6e-4",
    "best_worst": "explore.policy=best_worst,algorithm.normalise=batch,train.lr=6e-4",
    "planner": "explore.policy=planner,algorithm.normalise=batch,train.lr=6e-4",
}

Pairs = list[tuple[Prompt, int]]


class Clock:
    """Hardware seconds, measured once and kept in a file: of an image, of an iteration's updates by size."""

    def __init__(self, path: Path, spot: int) -> None:
        self.path, self.spot = path, spot
        self.costs: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def image_s(self, config: RunConfig) -> float:
        """Seconds of one image and its reward."""
        return self._costs(config)[0]

    def train_s(self, config: RunConfig) -> float:
        """Seconds of an iteration's updates."""
        return self._costs(config)[1]

    def rollout_s(self, config: RunConfig, images: int, gpus: int) -> float:
        """Seconds until that many GPUs, one image after the other, have made so many."""
        return math.ceil(images / gpus) * self.image_s(config)

    def iteration_s(self, config: RunConfig, gpus: int) -> float:
        """Seconds of an iteration whose roll-out has `gpus` GPUs."""
        images = config.data.prompts_per_iteration * config.data.group_size
        images *= POOL if config.explore.policy == "best_worst" else 1
        return self.rollout_s(config, images, gpus) + self.train_s(config)

    def _costs(self, config: RunConfig) -> tuple[float, float]:
        image = f"image in {config.sampler.steps} steps"
        d, a = config.data, config.algorithm
        train = f"training on {d.prompts_per_iteration} x {d.group_size}, {a.kind}, {a.steps_trained} steps"
        if image not in self.costs or train not in self.costs:
            image_s, self.costs[train] = measure(config)
            self.costs.setdefault(image, image_s)
            self.path.write_text(json.dumps(self.costs, indent=1) + "\n")
        return self.costs[image], self.costs[train]


def measure(config: RunConfig, rounds: int = 7) -> tuple[float, float]:
    """CPU seconds of an image and of an iteration's updates: medians of rounds that alternate.

    Images are made in batches as large as the trainer's, so that the size of a batch favours neither.
    """
    run, image_s, train_s = Run(config, drafts=0), [], []
    size = config.train.micro_batch
    for iteration in range(rounds):
        rows = data.batch(run.train_rows, iteration, config.data.prompts_per_iteration, config.seed)
        pairs = [(row, j) for row in rows for j in range(config.data.group_size)]
        states, values = [], []
        for start in range(0, len(pairs), size):
            began = time.process_time()
            part = pairs[start : start + size]
            states += run.sample(part, run.trainer.sampler, keep=True)
            values += run.rewards(part, states[start:]).values
            image_s.append((time.process_time() - began) / len(part))
        batch = [TrainSample.of(s, p.text, r) for s, (p, _), r in zip(states, pairs, values, strict=True)]
        began = time.process_time()
        run.trainer.train(batch, iteration)
        train_s.append(time.process_time() - began)
    return statistics.median(image_s), statistics.median(train_s)


class Arm(Run):
    """One seed of one arm."""

    def __init__(self, config: RunConfig, clock: Clock) -> None:
        super().__init__(config, drafts=0)
        self.policy, self.clock = config.explore.policy, clock
        setting = DraftSetting(config.sampler.steps, config.model.height, config.model.width)
        self.planner = DraftPlanner(
            policy=self.policy,
            value=config.explore.phi,
            seed=config.seed,
            settings=(setting,),
            control_share=0.0,
            max_drafts=MOST_DRAFTS,
        )
        self.chosen: Pairs | None = None

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration as the arm does it."""
        stale = self.trainer.trainable()
        with params.bound(self.adapter.transformer, stale):
            batch = self.finals(iteration)
        metrics = self.trainer.train(batch, iteration)
        if self.policy in ("uniform", "planner"):
            with params.bound(self.adapter.transformer, stale):
                self.draft(iteration + 1, USED * self.clock.train_s(self.config))
        return metrics

    def finals(self, iteration: int) -> list[TrainSample]:
        """What is trained on: the seeds that were kept, the best and worst of a fresh pool, or random ones."""
        size = self.config.data.group_size
        pool = size * (POOL if self.policy == "best_worst" else 1)
        pairs = self.chosen or self.fresh(iteration, pool)
        states, values = self.make(pairs, keep=True)
        samples = [TrainSample.of(s, p.text, r) for s, (p, _), r in zip(states, pairs, values, strict=True)]
        if self.policy != "best_worst":
            return samples
        groups = range(0, len(samples), pool)
        return [samples[i + j] for i in groups for j in best_worst(values[i : i + pool], size)]

    def draft(self, iteration: int, budget_s: float) -> None:
        """Draft for `iteration` on the clock with the weights that are in the model; keep the choice."""
        by_row = {prompt.row: prompt for prompt in self.prompts(iteration)}
        first, size = iteration * SEEDS_PER_ITERATION, self.config.data.group_size
        each_s, now = self.clock.image_s(self.config), 0.0
        self.planner.open(
            iteration, list(by_row), [""] * len(by_row), first, size, now, budget_s, self.clock.spot
        )
        while each := min(BATCH, int((budget_s - now) / each_s)):  # of every worker, all in step
            pairs = [
                (by_row[row], seed) for row, seed in self.planner.next_drafts(each * self.clock.spot, now)
            ]
            if not pairs:
                break
            now += each * each_s
            for (prompt, seed), reward in zip(pairs, self.make(pairs)[1], strict=True):
                self.planner.draft_done(prompt.row, seed, reward, each_s, now)
        plan = self.planner.close(budget_s)
        self.images_drafted += plan.stats.slots_used
        self.chosen = [(by_row[group.row], seed) for group in plan.groups for seed in group.seeds]

    def fresh(self, iteration: int, number: int) -> Pairs:
        """Random seeds of the iteration's prompts."""
        first = iteration * SEEDS_PER_ITERATION
        return [(prompt, first + j) for prompt in self.prompts(iteration) for j in range(number)]

    def prompts(self, iteration: int) -> list[Prompt]:
        """The batch of an iteration."""
        n = self.config.data.prompts_per_iteration
        return data.batch(self.train_rows, iteration, n, self.config.seed)

    def make(self, pairs: Pairs, keep: bool = False) -> tuple[Any, list[float | None]]:
        """States and rewards."""
        states = self.sample(pairs, self.trainer.sampler, keep=keep)
        return states, self.rewards(pairs, states).values


def run_arm(name: str, settings: str, seed: int, clock: Clock, options: argparse.Namespace) -> Row:
    """One curve, stopped at the highest target, at the horizon, or when it has collapsed."""
    overrides = ["eval_every=4", "data.validation_size=128", "iterations=100000"]
    config = configuration.load("tiny", [f"seed={seed}", *overrides, *settings.split(",")])
    iteration_s, began = clock.iteration_s(config, 1 + clock.spot), time.process_time()
    arm = Arm(config, clock)
    horizon = math.ceil(options.horizon / iteration_s)
    curve: list[tuple[int, float]] = []
    for point in arm.curve():
        curve.append((int(point["iteration"]), point["score"]))
        collapsed = point["score"] < curve[0][1] - COLLAPSED
        if collapsed or point["score"] >= max(options.targets):
            break
        if point["iteration"] >= horizon:
            break
    return {
        "arm": name,
        "seed": seed,
        "set": settings,
        "horizon": horizon,
        "iteration_s": round(iteration_s, 4),
        "on_demand_iteration_s": round(clock.iteration_s(config, 1), 4),
        "drafts_per_prompt": arm.images_drafted / max(curve[-1][0], 1) / config.data.prompts_per_iteration,
        "cpu_s": round(time.process_time() - began, 1),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--arms", nargs="+", default=list(SETTINGS), metavar="NAME[=KEY=VALUE,...]")
    parser.add_argument("--spot", type=int, default=4, help="spot GPUs beside the one that trains")
    parser.add_argument("--spot-price", type=float, default=0.27, help="of a spot GPU, on demand being 1")
    parser.add_argument(
        "--horizon", type=float, default=30.0, help="hardware seconds after which an arm is stopped"
    )
    parser.add_argument("--targets", type=float, nargs="+", default=[0.80, 0.85, 0.90])
    results = Path(__file__).parent / "results"
    parser.add_argument("--rows", type=Path, default=results / "exploration.jsonl")
    parser.add_argument(
        "--clock", type=Path, help="measured costs, kept for the next call; default: beside --rows"
    )
    parser.add_argument("--out", type=Path, help="write the summary here, and a plot beside it")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock(options.clock or options.rows.with_name("exploration_clock.json"), options.spot)
    rows = (
        [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    )
    arms = {
        name: settings or SETTINGS[name] for name, _, settings in (a.partition("=") for a in options.arms)
    }
    for seed in options.seeds:
        for name, settings in arms.items():
            if any((row["seed"], row["set"]) == (seed, settings) for row in rows):
                continue
            rows.append(run_arm(name, settings, seed, clock, options))
            with options.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            if not options.json:
                print(json.dumps(rows[-1]), flush=True)
    mine = [row for row in rows if row["arm"] in arms and row["seed"] in options.seeds]
    setup = {"spot": options.spot, "spot_price": options.spot_price}
    summary = summarise(mine, options.targets, options.spot, options.spot_price)
    result = short({**setup, "clock": clock.costs, "arms": summary})
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        plot(mine, options.out.with_suffix(".png"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
