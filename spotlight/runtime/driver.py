"""The verbs of a run, as the loop says them. Each one blocks until it is done, but for `explore`.

The driver holds no decision about work (the coordinator's), about seeds (the planner's) or about learning (the
trainer's): it calls them in order, passes on what one has for the next, and tells the world.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spotlight.core.draft_cost import TrainingBudget
from spotlight.core.prompts import PromptSampler
from spotlight.core.types import SampleId
from spotlight.errors import CapacityError
from spotlight.observe.meter import RunMeter
from spotlight.observe.metrics import Recorder
from spotlight.rl import data
from spotlight.runtime.accounts import Accounts
from spotlight.runtime.fleet import Fleet
from spotlight.runtime.place import Place
from spotlight.runtime.remote import get
from spotlight.runtime.trainers import Trainers

COLLECT_S = 1.0
AWAIT_SPOT_S = (
    1800.0  # as long as one launch may take; a cloud needs minutes to boot a machine and to fill it
)
DESERTED_S = 60.0
FIRST_BUDGET_S = 60.0  # before the first training has been timed
SEEDS_PER_ITERATION = 65_536
Emit = Callable[[Mapping[str, Any]], None]
Groups = Sequence[tuple[int, Sequence[int]]]  # (row, seeds) of every group; empty: none chosen yet


@dataclass(slots=True)
class Driver:
    """Everything the loop talks to."""

    place: Place
    coordinator: Any
    trainers: Trainers
    fleet: Fleet
    meter: RunMeter
    recorder: Recorder
    accounts: Accounts
    emit: Emit
    prompts: Sequence[data.Prompt]
    version: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    _budget: TrainingBudget = field(default_factory=lambda: TrainingBudget(quantile=0.9))
    _collected: int = 0
    _numbers: dict[str, float] = field(default_factory=dict)
    _rows: dict[int, list[int]] = field(default_factory=dict)
    _prompt_sampler: PromptSampler | None = None

    def await_spot(self, number: int) -> None:
        """Wait until so many spot nodes can serve. Raises CapacityError when they do not come."""
        deadline = time.monotonic() + AWAIT_SPOT_S
        while self._num_spot() < number:
            if time.monotonic() > deadline:
                raise CapacityError(
                    f"{self._num_spot()} of {number} spot nodes were ready after {AWAIT_SPOT_S:.0f} s",
                    hint="lower cluster.start_with: a run can begin with none",
                )
            time.sleep(0.1)

    def begin(self, iteration: int) -> None:
        """A new iteration: its numbers start empty."""
        self._numbers = {"weights_version": float(self.version)}
        self.fleet.iteration_began(iteration)

    def rows(self, iteration: int) -> list[int]:
        """The prompts of an iteration, known while the one before is trained."""
        config = self.place.config
        number = config.data.prompts_per_iteration
        if config.data.favour_informative:
            if iteration not in self._rows:
                self._rows = {iteration: self._sampler().next_batch(number)}
            return self._rows[iteration]
        chosen = data.batch(self.prompts, iteration, number, config.seed, config.data.shuffle)
        return [prompt.row for prompt in chosen]

    def explore(self, iteration: int) -> bool:
        """From now on idle spot workers draft for `iteration`, until `choose`. False: there is no drafting."""
        config = self.place.config
        budget_s = self._budget.seconds()
        return bool(
            self._call(
                "open_drafts",
                {
                    "iteration": iteration,
                    "rows": self.rows(iteration),
                    "first_seed": iteration * SEEDS_PER_ITERATION,
                    "k": config.data.group_size,
                    "budget_s": FIRST_BUDGET_S if budget_s is None else budget_s,
                },
            )
        )

    def choose(self, iteration: int) -> Groups:
        """End drafting; the seeds to regenerate for `iteration`. With a fixed number of drafts, wait for them."""
        began = time.monotonic()
        if self.place.config.explore.fixed_drafts:
            self._await_drafts()
        plan = self._call("close_drafts")
        self._numbers["explore_s"] = time.monotonic() - began
        stats = plan["stats"]
        self._numbers["drafts"] = float(stats["slots_used"])
        self._numbers["variance_gain"] = (
            stats["kept_variance"] / stats["random_variance"] if stats["random_variance"] else 1.0
        )
        return [(group["row"], list(group["seeds"])) for group in plan["groups"]]

    def roll_out(self, iteration: int, groups: Groups) -> list[dict[str, Any]]:
        """Make all finals, on every GPU there is. Returns the outcomes committed, one per sample."""
        began = self._phase("roll_out", iteration)
        steps = self.place.config.sampler.steps
        key = f"final/{steps}/{self.place.config.model.height}x{self.place.config.model.width}"
        wanted = {f"final/it{iteration}/row{row}/s{seed}" for row, seeds in groups for seed in seeds}
        requests = [
            {"kind": "final", "sample": name.removeprefix("final/"), "batch_key": key, "num_steps": steps}
            for name in sorted(wanted)
        ]
        self._call("submit", requests)
        helping = self.trainers.start("roll_out")
        outcomes: list[dict[str, Any]] = []
        while wanted:
            self.trainers.check(helping)
            for item in self._collect()["items"]:
                if item["request"] in wanted:
                    wanted.discard(item["request"])
                    if item["fate"] == "committed":
                        outcomes.append(item["outcome"])
                    else:
                        self.emit({"kind": "warning", "text": f"{item['request']}: {item['reason']}"})
        self.trainers.everywhere("end_roll_out")
        self.trainers.finish(helping)
        wall_s = self._done("roll_out", iteration, began)
        self._numbers["images_per_s"] = len(outcomes) / max(wall_s, 1e-9)
        self._learn(outcomes)
        return outcomes

    def train(self, iteration: int, outcomes: Sequence[Mapping[str, Any]]) -> None:
        """Optimiser steps on the outcomes; spot workers draft meanwhile."""
        began = self._phase("train", iteration)
        self._numbers |= self.trainers.everywhere("train", iteration, list(outcomes))
        self._done("train", iteration, began)
        self.trainers.tell_first("discard", iteration)

    def publish(self) -> None:
        """The trained weights become the next version."""
        began = self._phase("publish", self.version)
        self.version += 1
        self._publish(self.version)
        self._done("publish", self.version - 1, began)

    def publish_first(self, version: int) -> None:
        """The weights that the run starts or goes on from; then the trainer can serve too."""
        self.version = version
        self._publish(version)
        self.trainers.everywhere("join")

    def evaluate(self, iteration: int) -> None:
        """Held-out score after `iteration` iterations."""
        began = self._phase("eval", iteration)
        result = self.trainers.evaluate(iteration)
        self._done("eval", iteration, began)
        self.scores[iteration] = result["score"]
        self.emit(
            {"kind": "eval", "iteration": iteration, "score": result["score"], "exact": result["exact"]}
        )
        self.emit({"kind": "grid", "iteration": iteration, "path": result["grid"]})
        self.recorder.record(
            "eval", iteration, {"score": result["score"], "exact": result["exact"]}, time.time()
        )

    def release_spot(self) -> None:
        """Nothing is left for the spot nodes to do: give them back before they cost more."""
        self.fleet.release()

    def checkpoint(self, iteration: int, groups: Groups) -> None:
        """All that is needed to go on with `iteration`, the seeds chosen for it included."""
        meta = {
            "version": self.version,
            "groups": [[row, list(seeds)] for row, seeds in groups],
            "scores": self.scores,
            "planner": self._call("draft_state"),
            "prompts": self._prompt_sampler.state() if self._prompt_sampler else None,
        }
        path = self.trainers.everywhere("save", iteration, meta)
        self.emit({"kind": "checkpoint", "iteration": iteration, "path": f"checkpoints/{path}"})

    def go_on_from(self, meta: Mapping[str, Any]) -> Groups:
        """Take up what `checkpoint` put down; returns the seeds chosen for the next iteration."""
        self.scores.update({int(iteration): score for iteration, score in meta["scores"].items()})
        self._call("restore_drafts", meta["planner"])
        if meta["prompts"] is not None:
            self._sampler().restore(meta["prompts"])
        self.publish_first(meta["version"])
        return [(row, list(seeds)) for row, seeds in meta["groups"]]

    def spent(self) -> str:
        """Why the budget does not allow another iteration, or ""."""
        return self.accounts.forecast().reason

    def report(self, iteration: int, wall_s: float) -> None:
        """An iteration is over: its numbers to all who keep them."""
        self.meter.catch_up()
        window = self.meter.windows[-1] if self.meter.windows else None
        if window is not None and window.iteration == iteration and window.busy_share is not None:
            self._numbers["spot_busy_share"] = window.busy_share
        free_s = sum(self._numbers.get(f"{phase}_s", 0.0) for phase in ("train", "eval"))
        self._budget.observe(free_s)
        numbers = {**self._numbers, "wall_s": wall_s, "preemptions": float(self.meter.preemptions)}
        if money := self.accounts.estimate():
            numbers |= {"usd": money.usd, "usd_per_h": money.usd_per_h}
        self.emit({"kind": "iteration", "iteration": iteration, **numbers})
        self.recorder.record("iteration", iteration, numbers, time.time())

    # ------------------------------------------------------------------------------------ inside

    def _num_spot(self) -> int:
        workers = self._call("snapshot")["workers"]
        return sum(worker["role"] == "spot" and worker["serving"] for worker in workers.values())

    def _publish(self, version: int) -> None:
        stored = self.trainers.everywhere("publish", version)
        self._call("publish", *stored)

    def _learn(self, outcomes: Sequence[Mapping[str, Any]]) -> None:
        """The finals are in: what they say of the drafts that chose them, and of the prompts."""
        finals = [
            (sample.row, sample.seed, outcome.get("reward"))
            for outcome in outcomes
            for sample in [SampleId.parse(outcome["sample"])]
        ]
        report = self._call("draft_report", finals)
        if report is not None:
            self._numbers |= explore_numbers(report)
            if report["note"]:
                self.emit({"kind": "warning", "text": report["note"]})
        if self.place.config.data.favour_informative:
            for row in {row for row, _, _ in finals}:
                rewards = {reward for other, _, reward in finals if other == row}
                self._sampler().observe(row, zero_variance=len(rewards) == 1)

    def _sampler(self) -> PromptSampler:
        if self._prompt_sampler is None:
            self._prompt_sampler = PromptSampler(len(self.prompts), seed=self.place.config.seed)
        return self._prompt_sampler

    def _await_drafts(self) -> None:
        """Until all of a fixed number of drafts are in, or there is nobody left to make them."""
        deserted_at: float | None = None
        while not self._collect()["drafts_complete"]:
            now = time.monotonic()
            deserted_at = None if self._num_spot() else deserted_at or now
            if deserted_at is not None and now - deserted_at > DESERTED_S:
                text = f"no spot node for {DESERTED_S:.0f} s: going on with the drafts that are there"
                self.emit({"kind": "warning", "text": text})
                return

    def _collect(self) -> dict[str, Any]:
        reply: dict[str, Any] = self._call("collect", self._collected, COLLECT_S)
        self._collected = reply["next"]
        return reply

    def _phase(self, phase: str, iteration: int) -> float:
        began = time.monotonic()
        self.emit({"kind": "phase", "iteration": iteration, "phase": phase})
        self._note(phase, iteration, "begin", began)
        return began

    def _done(self, phase: str, iteration: int, began: float) -> float:
        now = time.monotonic()
        self._note(phase, iteration, "end", now)
        self._numbers[f"{phase}_s"] = self._numbers.get(f"{phase}_s", 0.0) + now - began
        return now - began

    def _note(self, phase: str, iteration: int, state: str, now: float) -> None:
        self._call(
            "note", {"type": "phase", "phase": phase, "iteration": iteration, "state": state, "now": now}
        )

    def _call(self, method: str, *arguments: Any) -> Any:
        return get(getattr(self.coordinator, method).remote(*arguments), 60.0)


def explore_numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """The planner's figures of an iteration, flat."""
    stats, rho = report["stats"], report["rho"]
    return {
        "rho": rho["mean"],
        "rho_low": rho["low"],
        "rho_high": rho["high"],
        "slots_offered": stats["slots_offered"],
        "slots_used": stats["slots_used"],
        "draft_overrun": stats["overrun"],
        "kept_variance": stats["kept_variance"],
        "random_variance": stats["random_variance"],
        "final_variance": report["final_variance"],
        "zero_variance_share": report["final_zero_variance_share"],
        "variance_gain_per_gpu_s": report["gain_per_gpu_s"],
    }
