"""The exploration planner as the coordinator holds it: plain values in and out, its answers recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from spotlight.core.draft_cost import DraftSetting
from spotlight.core.events import OpenDrafts
from spotlight.core.explore import DraftPlanner


class Drafting:
    """A draft source for the scheduler that notes what the planner answered, for replay."""

    def __init__(self, planner: DraftPlanner) -> None:
        self.planner = planner
        self.answers: list[list[tuple[int, int]]] = []

    def open(self, spec: Mapping[str, Any], num_workers: int, now: float) -> OpenDrafts | None:
        """Begin an iteration's drafts: `spec` holds iteration, rows, categories, first_seed, k, budget_s.

        None: the planner wants none. The batch key tells a worker steps and size, "draft/4/512x512".
        """
        setting = self.planner.open(
            spec["iteration"],
            spec["rows"],
            spec.get("categories") or [""] * len(spec["rows"]),
            spec["first_seed"],
            spec["k"],
            now,
            spec["budget_s"],
            num_workers,
        )
        if setting is None:
            return None
        key = f"draft/{setting.steps}/{setting.height}x{setting.width}"
        return OpenDrafts(spec["iteration"], key, setting.steps, tuple(spec["rows"]))

    def close(self, now: float) -> dict[str, Any]:
        """End it: the plan as plain values, {iteration, groups: [{row, seeds, control, ...}], stats}."""
        return asdict(self.planner.close(now))

    def report(self, finals: Iterable[tuple[int, int, float | None]]) -> dict[str, Any] | None:
        """The figures of the last plan, learned from the rewards of its `finals`: (row, seed, reward) each."""
        for final in finals:
            self.planner.finals(*final)
        report = self.planner.report()
        if report is None:
            return None
        return {**asdict(report), "gain_per_gpu_s": report.stats.gain_per_gpu_s}

    def state(self) -> dict[str, Any]:
        """What the planner has learned, for a checkpoint."""
        return self.planner.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what an earlier planner had learned."""
        self.planner.restore(state)

    def take_answers(self) -> list[list[tuple[int, int]]]:
        """What `next_drafts` gave since the last time, call by call."""
        answers, self.answers = self.answers, []
        return answers

    def next_drafts(self, max_requests: int, now: float) -> list[tuple[int, int]]:
        """As the planner's."""
        drafts = self.planner.next_drafts(max_requests, now)
        self.answers.append(drafts)
        return drafts

    def draft_done(self, row: int, seed: int, reward: float | None, cost_s: float, now: float) -> None:
        """As the planner's."""
        self.planner.draft_done(row, seed, reward, cost_s, now)

    def draft_returned(self, row: int, seed: int) -> None:
        """As the planner's."""
        self.planner.draft_returned(row, seed)


def drafting(spec: Mapping[str, Any]) -> Drafting:
    """From the planner's keyword arguments as plain values; `settings` as [steps, height, width] each."""
    settings = tuple(DraftSetting(*setting) for setting in spec["settings"])
    return Drafting(DraftPlanner(**{**spec, "settings": settings}))
