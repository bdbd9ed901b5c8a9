"""Draft policies side by side in synthetic worlds: kept variance, truncation, overrun, regret, planning cost.

Everything is paired: all policies see the same worlds. Intervals are 95 % bootstrap over worlds. Parts can
be run one by one; each adds its cells to the file of `--out` and draws its plot beside it.

    python benchmarks/planner.py --parts kept --families binary --worlds 30
    python benchmarks/planner.py --json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spotlight.core.belief import RewardBelief
from spotlight.core.draft_book import DraftBook
from spotlight.core.draft_policies import Law, Oracle, Planner, phi
from spotlight.core.explore import DraftPlanner
from spotlight.sim.draft_world import FAMILIES, IterationResult, WorldSpec, cut_short, run_world

RHOS = (0.95, 0.8, 0.6, 1.0)
POLICIES = ("none", "uniform", "std", "variance", "best_worst", "planner", "oracle")
CUTS = (0.25, 0.5, 0.75)
PHIS = ("identity", "sqrt", "cap:0.005")
POOL = 32  # four times k, as Sol-RL's 24 in 96

Make = Callable[[dict[int, Law]], DraftPlanner]


def maker(policy: str, seed: int, value: str = "identity") -> Make:
    def make(laws: dict[int, Law]) -> DraftPlanner:
        rule = Oracle(laws, phi(value), seed) if policy == "oracle" else policy
        return DraftPlanner(policy=rule, seed=seed, value=value, pool=POOL)

    return make


def worlds(spec: WorldSpec, policy: str, number: int, value: str = "identity") -> list[list[IterationResult]]:
    return [run_world(spec, seed, maker(policy, seed, value), RHOS) for seed in range(number)]


def per_world(runs: list[list[IterationResult]], pick: Callable[[IterationResult], float]) -> np.ndarray:
    return np.array([np.mean([pick(result) for result in run]) for run in runs])


def interval(statistic: Callable[..., float], *columns: np.ndarray, draws: int = 2000) -> list[float]:
    """Value and 95 % bootstrap interval of a statistic of paired columns (one entry per world)."""
    rng = np.random.default_rng(0)
    picks = rng.integers(len(columns[0]), size=(draws, len(columns[0])))
    spread = [statistic(*(column[pick] for column in columns)) for pick in picks]
    low, high = np.percentile(spread, [2.5, 97.5])
    return [round(float(x), 4) for x in (statistic(*columns), low, high)]


def rho_variance(rho: float, result: IterationResult) -> float:
    return result.variance[rho]


def ratio(a: np.ndarray, b: np.ndarray) -> float:
    return float((a / b).mean())


def lead(policy: np.ndarray, uniform: np.ndarray, none: np.ndarray) -> float:
    return float(((policy - uniform) / none).mean())


def gap(policy: np.ndarray, uniform: np.ndarray, oracle: np.ndarray, none: np.ndarray) -> float:
    """Share of the way from uniform to oracle, all relative to no exploration in the same world."""
    return float(((policy - uniform) / none).mean() / ((oracle - uniform) / none).mean())


def kept(family: str, number: int) -> dict[str, Any]:
    """Final variance of the kept groups over that of random seeds, by rho and policy."""
    spec = WorldSpec(family, iterations=14, warmup=4)
    runs = {policy: worlds(spec, policy, number) for policy in POLICIES}
    cell: dict[str, Any] = {"worlds": number}
    for rho in RHOS:
        variance = {p: per_world(runs[p], partial(rho_variance, rho)) for p in POLICIES}
        row: dict[str, Any] = {p: interval(ratio, variance[p], variance["none"]) for p in POLICIES}
        columns = (variance["uniform"], variance["oracle"], variance["none"])
        row["gap_recovered"] = interval(gap, variance["planner"], *columns)
        row["planner_minus_uniform"] = interval(
            lead, variance["planner"], variance["uniform"], variance["none"]
        )
        cell[f"rho={rho}"] = row
    zero = {p: per_world(runs[p], lambda r: r.zero_share[RHOS[0]]) for p in POLICIES}
    cell["zero_variance_share"] = {p: round(float(zero[p].mean()), 4) for p in POLICIES}
    cell["overrun"] = interval(np.mean, per_world(runs["planner"], lambda r: r.stats.overrun))
    used = per_world(runs["planner"], lambda r: r.stats.slots_used / max(r.stats.slots_offered, 1))
    cell["slots_used_share"] = interval(np.mean, used)
    cell["overruns"] = [round(r.stats.overrun, 5) for run in runs["planner"] for r in run]
    return cell


def truncation(family: str, number: int) -> dict[str, Any]:
    """Final variance when training ends early unforeseen, against a plan that knew."""
    spec = WorldSpec(family, prompts=300, batch=12, workers=(8, 15), iterations=7, warmup=3)
    none = per_world(worlds(spec, "none", number), lambda r: r.variance[0.95])
    cell: dict[str, Any] = {"worlds": number}
    for cut in CUTS:
        runs = {
            "cut": worlds(cut_short(spec, cut, known=False), "planner", number),
            "known": worlds(cut_short(spec, cut, known=True), "planner", number),
            "uniform": worlds(cut_short(spec, cut, known=False), "uniform", number),
        }
        v = {name: per_world(run, lambda r: r.variance[0.95]) for name, run in runs.items()}
        cell[f"cut={cut}"] = {
            "truncation_loss": interval(lambda a, b: 1.0 - float((a / b).mean()), v["cut"], v["known"]),
            **{name: interval(ratio, v[name], none) for name in v},
        }
    return cell


def regret(family: str, number: int) -> dict[str, Any]:
    """Cumulative (oracle - policy) final variance with drift off and prompts that come back."""
    spec = WorldSpec(family, prompts=24, batch=8, iterations=48, warmup=0, drift=0.0, workers=(5, 10))
    runs = {p: worlds(spec, p, number) for p in ("oracle", "planner", "uniform")}
    series = {p: np.array([[r.variance[1.0] for r in run] for run in runs[p]]) for p in runs}
    scale = (series["oracle"] - series["uniform"]).mean()
    lost = (series["oracle"] - series["planner"]) / scale
    half = spec.iterations // 2
    early, late = lost[:, :half].mean(axis=1), lost[:, half:].mean(axis=1)
    return {
        "worlds": number,
        "early": interval(np.mean, early),
        "late": interval(np.mean, late),
        "late_over_early": interval(lambda a, b: float(a.mean() / b.mean()), late, early),
        "planner": np.cumsum(lost.mean(axis=0)).round(4).tolist(),
        "uniform": np.cumsum(((series["oracle"] - series["uniform"]) / scale).mean(axis=0)).round(4).tolist(),
    }


def value(family: str, number: int) -> dict[str, Any]:
    """What phi does: variance, mean deviation and zero-variance share of the final groups."""
    spec = WorldSpec(family, iterations=14, warmup=4)
    none = worlds(spec, "none", number)
    cell: dict[str, Any] = {"worlds": number}
    for name in ("none", "uniform", *PHIS):
        policy = name if name in ("none", "uniform") else "planner"
        runs = (
            none
            if name == "none"
            else worlds(spec, policy, number, name if policy == "planner" else "identity")
        )
        cell[name] = {
            "variance": interval(
                ratio,
                per_world(runs, lambda r: r.variance[0.95]),
                per_world(none, lambda r: r.variance[0.95]),
            ),
            "deviation": interval(
                ratio,
                per_world(runs, lambda r: r.deviation[0.95]),
                per_world(none, lambda r: r.deviation[0.95]),
            ),
            "zero_variance_share": interval(np.mean, per_world(runs, lambda r: r.zero_share[0.95])),
        }
    return cell


class PilotsFirst(Planner):
    """The planner's rule, but only once every prompt has k drafts."""

    def priority(self, book: DraftBook, slots_left: float) -> np.ndarray:
        """Pilots in turn, then the planner."""
        return np.where(book.issued < book.k, 1e9 - book.issued, super().priority(book, slots_left))


def pilots(family: str, number: int) -> dict[str, Any]:
    """Whether k drafts of every prompt should come first, when time is short and when it is not."""
    cell: dict[str, Any] = {"worlds": number}
    for training_s in (16.0, 32.0):
        spec = WorldSpec(
            family, prompts=300, batch=12, workers=(8, 15), iterations=8, warmup=3, training_s=training_s
        )

        def first(seed: int) -> Make:
            def make(_: dict[int, Law]) -> DraftPlanner:
                belief = RewardBelief(seed=seed)
                planner = DraftPlanner(policy=PilotsFirst(belief, phi("identity")), seed=seed)
                planner.belief = belief
                return planner

            return make

        none, planner = (
            per_world(worlds(spec, p, number), partial(rho_variance, 0.95)) for p in ("none", "planner")
        )
        runs = [run_world(spec, seed, first(seed), RHOS) for seed in range(number)]
        slots = np.mean([result.stats.slots_used for run in runs for result in run]) / spec.batch / spec.k
        cell[f"drafts per kept seed={slots:.1f}"] = {
            "planner": interval(ratio, planner, none),
            "pilots_first": interval(ratio, per_world(runs, partial(rho_variance, 0.95)), none),
        }
    return cell


def planning_cost(batch: int, cap: int, k: int, levels: int, burst: int) -> dict[str, Any]:
    """CPU milliseconds per pull, the results that came in since the last one included.

    `burst` results come in between two pulls of as many drafts.
    """
    rng = np.random.default_rng(0)
    planner = DraftPlanner(seed=1, max_drafts=cap)
    pulls, opens = [], []
    for iteration in range(2):
        begun = time.thread_time()
        planner.open(iteration, range(batch), ["a"] * batch, 0, k, 0.0, 1e9, burst)
        opens.append(time.thread_time() - begun)
        out: list[tuple[int, int]] = []
        while True:
            begun = time.thread_time()
            for row, seed in out:
                reward = rng.integers(levels) / levels if levels else float(rng.normal(row, 1 + row / 9))
                planner.draft_done(row, seed, float(reward), 1.0, 0.0)
            out = planner.next_drafts(burst, 0.0)
            pulls.append(time.thread_time() - begun)
            if not out:
                break
        planner.close(0.0)
    ms = 1e3 * np.array(pulls)
    return {
        **{"prompts": batch, "seeds": cap, "k": k, "levels": levels, "burst": burst, "pulls": len(pulls)},
        **{f"p{q}_ms": round(float(np.percentile(ms, q)), 3) for q in (50, 99)},
        "mean_ms": round(float(ms.mean()), 3),
        "open_ms": round(1e3 * max(opens), 1),
    }


def cost(_family: str, _number: int) -> dict[str, Any]:
    sizes = [
        (8, 64, 8),
        (16, 64, 8),
        (32, 64, 8),
        (64, 64, 8),
        (128, 64, 8),
        (64, 16, 8),
        (64, 32, 8),
        (64, 64, 24),
    ]
    table = [planning_cost(*size, levels=11, burst=1) for size in sizes]
    table.append(planning_cost(64, 64, 8, levels=0, burst=1))
    table.append(planning_cost(64, 64, 8, levels=11, burst=16))
    return {"table": table}


PARTS = {
    "kept": kept,
    "truncation": truncation,
    "regret": regret,
    "value": value,
    "pilots": pilots,
    "cost": cost,
}


def plots(results: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    for part, draw in (("kept", plot_kept), ("truncation", plot_truncation), ("regret", plot_regret)):
        if cells := results.get(part):
            figure, axes = plt.subplots(1, len(cells), figsize=(3.2 * len(cells), 3.0), squeeze=False)
            for axis, (family, cell) in zip(axes[0], cells.items(), strict=True):
                axis.set_title(family)
                draw(axis, cell)
            axes[0][0].legend(fontsize=7)
            figure.tight_layout()
            figure.savefig(folder / f"planner_{part}.png", dpi=110)
            plt.close(figure)
    if cells := results.get("kept"):
        figure, axis = plt.subplots(figsize=(4.0, 3.0))
        for family, cell in cells.items():
            axis.plot(
                np.linspace(0, 100, len(cell["overruns"])), 100 * np.sort(cell["overruns"]), label=family
            )
        axis.axhline(2.0, color="grey", linestyle=":")
        axis.set_xlabel("percent of iterations")
        axis.set_ylabel("overrun, % of worker time")
        axis.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(folder / "planner_overrun.png", dpi=110)
        plt.close(figure)


def plot_kept(axis: Any, cell: dict[str, Any]) -> None:
    for policy in POLICIES[1:]:
        points = np.array([cell[f"rho={rho}"][policy] for rho in sorted(RHOS)])
        axis.errorbar(
            sorted(RHOS), points[:, 0], yerr=np.abs(points[:, 1:] - points[:, :1]).T, label=policy, capsize=2
        )
    axis.set_xlabel("rho")
    axis.set_ylabel("final variance / random seeds")


def plot_truncation(axis: Any, cell: dict[str, Any]) -> None:
    for name, label in (("known", "planner, foreseen"), ("cut", "planner, cut"), ("uniform", "uniform, cut")):
        points = np.array([cell[f"cut={cut}"][name] for cut in CUTS])
        axis.errorbar(
            CUTS, points[:, 0], yerr=np.abs(points[:, 1:] - points[:, :1]).T, label=label, capsize=2
        )
    axis.set_xlabel("share of the training time")
    axis.set_ylabel("final variance / random seeds")


def plot_regret(axis: Any, cell: dict[str, Any]) -> None:
    for policy in ("uniform", "planner"):
        axis.plot(cell[policy], label=policy)
    axis.set_xlabel("iteration")
    axis.set_ylabel("cumulative regret")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--worlds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planner.json")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part in options.parts:
        for family in ["all"] if part == "cost" else options.families:
            cell = PARTS[part](family, options.worlds)
            results.setdefault(part, {})[family] = cell
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            if not options.json:
                shown = {
                    key: entry for key, entry in cell.items() if key not in ("overruns", "planner", "uniform")
                }
                print(part, family, json.dumps(shown), flush=True)
    plots(results, options.out.parent)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
