"""Does exploring seeds on idle spot GPUs reach a score sooner, at equal hardware time?

Real weights, real images, real rewards, the real planner; only the clock is computed. One on-demand GPU trains and
`--spot` GPUs stand beside it. What an image (with its reward) and an iteration's updates cost is measured once, in CPU
seconds of one thread, and is the same for every arm. An iteration takes, all GPUs making images,

    none, uniform, planner    finals / (1 + spot) + training     drafts are made while training, for nothing
    best_worst                pool / (1 + spot) + training       the pool has fresh weights, so its best are the finals
    on-demand only            finals + training                  `none` without any spot GPU

and uniform and planner draft what `spot` GPUs finish within 90 % of the training time. An arm is a list of overrides
of the recipe, so every arm has its own learning rate; SETTINGS holds the best found on other seeds than those reported.

A row per arm and seed is appended to `--rows`; what is there is not run again. A target not reached within `--horizon`
hardware seconds is censored: means then are lower bounds ("at least"), and so are ratios to a censored baseline.

    python benchmarks/exploration.py --seeds 0 1 2 3 4 --rows /tmp/rows.jsonl
    python benchmarks/exploration.py --seeds 100 --rows /tmp/tune.jsonl --arms a=explore.policy=none,train.lr=6e-4

The summary holds per arm `iteration_s`, `drafts_per_prompt`, and by target `iterations_to_target`, `wall_s_to_target`,
`cost_to_target` (on-demand GPU seconds, a spot GPU at `--spot-price`) as {mean, low, high, reached, bound}, and
`speedup_same_machines`, `speedup_on_demand_only`, `saving_on_demand_only`: geometric means of ratios paired by seed.
Intervals are 95 % (Student's t, of logarithms for ratios).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from learning_curve import SEEDS_PER_ITERATION, Run
from scipy.stats import t as student

from spotlight import config as configuration
from spotlight.config import RunConfig
from spotlight.core.draft_cost import DraftSetting
from spotlight.core.explore import DraftPlanner
from spotlight.core.select import best_worst
from spotlight.rl import data, params
from spotlight.rl.batch import TrainSample
from spotlight.rl.data import Prompt

BATCH = 8  # images a worker makes at once
POOL = 4  # pool of best_worst per seed kept, as Sol-RL's 24 in 96
MOST_DRAFTS = 256  # of a prompt
USED = 0.9  # of the training time: drafts are planned for a low quantile of it (docs/planner.md)
COLLAPSED = 0.05  # below the base by this much, there is no point in going on
SETTINGS = {
    "none": "explore.policy=none",
    "uniform": "explore.policy=uniform",
    "best_worst": "explore.policy=best_worst",
    "planner": "explore.policy=planner",
}

Pairs = list[tuple[Prompt, int]]
Row = dict[str, Any]


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
    """CPU seconds of an image and of an iteration's updates: medians of rounds that alternate."""
    run, image_s, train_s = Run(config, drafts=0), [], []
    for iteration in range(rounds):
        rows = data.batch(run.train_rows, iteration, config.data.prompts_per_iteration, config.seed)
        pairs = [(row, j) for row in rows for j in range(config.data.group_size)]
        states, values = [], []
        for start in range(0, len(pairs), BATCH):
            began = time.process_time()
            part = pairs[start : start + BATCH]
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
        workers, each_s = self.clock.spot, self.clock.image_s(self.config)
        self.planner.open(iteration, list(by_row), [""] * len(by_row), first, size, 0.0, budget_s, workers)
        free: list[tuple[float, int, list[Any]]] = [(0.0, worker, []) for worker in range(workers)]
        tie = workers
        while free:
            now, _, done = heapq.heappop(free)
            for prompt, seed, reward in done:
                self.planner.draft_done(prompt.row, seed, reward, each_s, now)
            fit = min(BATCH, int((budget_s - now) / each_s))
            pairs = [(by_row[row], seed) for row, seed in self.planner.next_drafts(fit, now)] if fit else []
            if pairs:
                results = [(*pair, r) for pair, r in zip(pairs, self.make(pairs)[1], strict=True)]
                heapq.heappush(free, (now + len(pairs) * each_s, tie, results))
                tie += 1
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
    overrides = ["eval_every=4", "data.validation_size=200", "iterations=100000"]
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


def reached(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Iterations to the target, linearly between validations."""
    for (before, low), (after, high) in pairwise(curve):
        if high >= target:
            return before + max((target - low) / (high - low), 0.0) * (after - before)
    return None


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and its 95 % confidence interval (Student's t); without an interval for one value."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return {"mean": mean}
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return {"mean": mean, "low": mean - half, "high": mean + half}


def restricted(rows: Sequence[Row], target: float, scale: str | None, price: float = 1.0) -> dict[str, Any]:
    """Mean over seeds of iterations, or of those times row[scale] times price; censored ones count as they are."""
    found = [reached(row["curve"], target) for row in rows]
    ends = [row["horizon"] if n is None else n for row, n in zip(rows, found, strict=True)]
    each = [n * (row[scale] * price if scale else 1.0) for n, row in zip(ends, rows, strict=True)]
    hits = len(found) - found.count(None)
    bound = "exact" if hits == len(found) else "at least"
    return {**interval(each), "reached": f"{hits}/{len(found)}", "bound": bound}


def ratio(
    baseline: Sequence[Row], arm: Sequence[Row], target: float, scales: tuple[str, str], price: float = 1.0
) -> dict[str, Any]:
    """Baseline's time over the arm's, a geometric mean over common seeds; `scales` name their seconds per iteration.

    A censored baseline makes the ratio a lower bound, a censored arm an upper bound, both an unknown one.
    """
    theirs = {row["seed"]: row for row in baseline}
    pairs = [(theirs[row["seed"]], row) for row in arm if row["seed"] in theirs]
    logs, bounds = [], set()
    for base, row in pairs:
        found = [reached(base["curve"], target), reached(row["curve"], target)]
        bounds |= {name for name, n in zip(("at least", "at most"), found, strict=True) if n is None}
        ends = [r["horizon"] if n is None else n for r, n in zip((base, row), found, strict=True)]
        logs.append(math.log(ends[0] * base[scales[0]] / (ends[1] * row[scales[1]] * price)))
    if not logs:
        return {}
    bound = "exact" if not bounds else bounds.pop() if len(bounds) == 1 else "unknown"
    return {**{key: math.exp(value) for key, value in interval(logs).items()}, "bound": bound}


def summarise(rows: Sequence[Row], targets: Sequence[float], spot: int, spot_price: float) -> dict[str, Any]:
    """Per arm its times, costs and speed-ups by target."""
    price = 1 + spot * spot_price
    arms: dict[str, list[Row]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    none = arms.get("none", [])
    out: dict[str, Any] = {}
    here, alone = "iteration_s", "on_demand_iteration_s"
    if none:
        out["on_demand_only"] = {
            "iteration_s": none[0][alone],
            "iterations_to_target": {str(t): restricted(none, t, None) for t in targets},
            "wall_s_to_target": {str(t): restricted(none, t, alone) for t in targets},
            "cost_to_target": {str(t): restricted(none, t, alone) for t in targets},
        }
    for name, mine in arms.items():
        out[name] = {
            "set": mine[0]["set"],
            "seeds": [row["seed"] for row in mine],
            "iteration_s": mine[0][here],
            "drafts_per_prompt": statistics.fmean(row["drafts_per_prompt"] for row in mine),
            "iterations_to_target": {str(t): restricted(mine, t, None) for t in targets},
            "wall_s_to_target": {str(t): restricted(mine, t, here) for t in targets},
            "cost_to_target": {str(t): restricted(mine, t, here, price) for t in targets},
            "speedup_same_machines": {str(t): ratio(none, mine, t, (here, here)) for t in targets},
            "speedup_on_demand_only": {str(t): ratio(none, mine, t, (alone, here)) for t in targets},
            "saving_on_demand_only": {str(t): ratio(none, mine, t, (alone, here), price) for t in targets},
        }
    return out


def short(value: Any) -> Any:
    """Floats to four significant digits, throughout."""
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", default=list(SETTINGS), metavar="NAME[=KEY=VALUE,...]")
    parser.add_argument("--spot", type=int, default=4, help="spot GPUs beside the one that trains")
    parser.add_argument("--spot-price", type=float, default=0.27, help="of a spot GPU, on demand being 1")
    parser.add_argument(
        "--horizon", type=float, default=70.0, help="hardware seconds after which an arm is stopped"
    )
    parser.add_argument("--targets", type=float, nargs="+", default=[0.80, 0.85, 0.90])
    parser.add_argument("--rows", type=Path, default=Path("exploration.jsonl"))
    parser.add_argument(
        "--clock", type=Path, help="measured costs, kept for the next call; default: beside --rows"
    )
    parser.add_argument("--out", type=Path, help="write the summary here")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock(options.clock or options.rows.with_suffix(".clock.json"), options.spot)
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
    setup = {"spot": options.spot, "spot_price": options.spot_price, "horizon_s": options.horizon}
    summary = summarise(mine, options.targets, options.spot, options.spot_price)
    result = short({**setup, "clock": clock.costs, "arms": summary})
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
