"""How soon curves reach a score: times, costs and speed-ups of the arms of exploration.py, with 95 % intervals.

Per arm, and by target where it says so:

    set, seeds, horizon (in iterations), iteration_s, drafts_per_prompt
    iterations_to_target, wall_s_to_target
                             {mean, low, high, reached, bound}; a seed that does not arrive counts with its horizon, and
                             the mean is "at least" then
    cost_to_target           the same in on-demand GPU seconds, a spot GPU being cheaper by the price ratio
    speedup_same_machines    time of the best arm without exploration over this one's: both have the spot GPUs
    speedup_on_demand_only   the same, that arm having no spot GPU and doing its roll-out alone
    saving_on_demand_only    its cost over this one's

The last three are geometric means of ratios paired by seed, with `over`, the arm compared with, and `bound`: a
censored baseline makes a ratio a lower bound, a censored arm an upper one, both an unknown one. Intervals are
Student's t, of logarithms for ratios. Arms "..., on-demand only" are those without exploration on that clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from scipy.stats import t as student

HERE, ALONE = "iteration_s", "on_demand_iteration_s"  # seconds of an iteration, with and without spot GPUs

Row = dict[str, Any]


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
    """The summary: its keys are in the module's docstring."""
    arms: dict[str, list[Row]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    plain = [mine for mine in arms.values() if "explore.policy=none" in mine[0]["set"]]
    base = {target: min(plain, key=lambda mine: _slowness(mine, target)) for target in targets if plain}
    out = {name: _times(mine, targets, HERE, 1 + spot * spot_price) for name, mine in arms.items()}
    for name, mine in arms.items():
        out[name]["drafts_per_prompt"] = statistics.fmean(row["drafts_per_prompt"] for row in mine)
        for key, scale, price in (
            ("speedup_same_machines", HERE, 1.0),
            ("speedup_on_demand_only", ALONE, 1.0),
            ("saving_on_demand_only", ALONE, 1 + spot * spot_price),
        ):
            out[name][key] = {
                str(t): {"over": mine_of[0]["arm"], **ratio(mine_of, mine, t, (scale, HERE), price)}
                for t, mine_of in base.items()
            }
    alone = {f"{mine[0]['arm']}, on-demand only": _times(mine, targets, ALONE, 1.0) for mine in plain}
    return out | alone


def _slowness(rows: Sequence[Row], target: float) -> tuple[int, float]:
    """Censored seeds first, then seconds: the least is the best of the arms without exploration."""
    missed = sum(reached(row["curve"], target) is None for row in rows)
    return missed, restricted(rows, target, HERE)["mean"]


def _times(rows: Sequence[Row], targets: Sequence[float], scale: str, price: float) -> dict[str, Any]:
    return {
        "set": rows[0]["set"],
        "seeds": [row["seed"] for row in rows],
        "horizon": rows[0]["horizon"],
        "iteration_s": rows[0][scale],
        "iterations_to_target": {str(t): restricted(rows, t, None) for t in targets},
        "wall_s_to_target": {str(t): restricted(rows, t, scale) for t in targets},
        "cost_to_target": {str(t): restricted(rows, t, scale, price) for t in targets},
    }


def plot(rows: Sequence[Row], path: Path) -> None:
    """Every seed's curve over hardware time; a dot where it was stopped."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = [(row["arm"], row["iteration_s"], row["curve"]) for row in rows]
    curves += [
        ("on-demand only", row["on_demand_iteration_s"], row["curve"]) for row in rows if row["arm"] == "none"
    ]
    names = list(dict.fromkeys(name for name, _, _ in curves))
    figure, axis = plt.subplots(figsize=(7.0, 4.0))
    for number, name in enumerate(names):
        for j, (seconds, curve) in enumerate((s, c) for n, s, c in curves if n == name):
            at, score = [n * seconds for n, _ in curve], [value for _, value in curve]
            label = name if j == 0 else None
            axis.plot(at, score, color=f"C{number}", linewidth=1, alpha=0.7, label=label)
            axis.plot(at[-1:], score[-1:], "o", color=f"C{number}", markersize=4)
    axis.set_xlabel("hardware seconds")
    axis.set_ylabel("held-out score")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def short(value: Any) -> Any:
    """Floats to four significant digits, throughout."""
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
