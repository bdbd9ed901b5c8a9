"""The order of an iteration's phases, seen by a driver that only takes notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from spotlight.errors import BudgetError
from spotlight.runtime import loop
from spotlight.runtime.driver import Driver


class Notes:
    """Stands in for the driver: every call of the loop, with what it is about."""

    def __init__(self, iterations: int, checkpoint_every: int, over: str = "") -> None:
        config = SimpleNamespace(iterations=iterations, eval_every=2, checkpoint_every=checkpoint_every)
        self.place = SimpleNamespace(config=config)
        self.calls: list[tuple[str, int | None]] = []
        self.over = over

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments[0] if arguments else None))
            return {"choose": [(0, [1])], "spent": self.over}.get(name)

        return call


def notes_of(notes: Notes) -> list[tuple[str, int | None]]:
    loop.train(cast(Driver, notes))
    return notes.calls


def test_the_numbers_of_an_iteration_are_written_before_the_checkpoint_that_covers_it() -> None:
    calls = notes_of(Notes(iterations=4, checkpoint_every=2))
    for done in (2, 4):
        assert calls.index(("report", done - 1)) < calls.index(("checkpoint", done))
    assert [about for name, about in calls if name == "checkpoint"] == [2, 4]


def test_drafts_are_made_while_the_trainer_trains_and_chosen_afterwards() -> None:
    calls = notes_of(Notes(iterations=2, checkpoint_every=1))
    assert calls.index(("explore", 1)) < calls.index(("train", 0)) < calls.index(("choose", 1))
    assert ("explore", 2) not in calls
    assert calls.index(("release_spot", None)) < calls.index(("train", 1))


def test_a_spent_budget_leaves_numbers_and_a_checkpoint_behind() -> None:
    notes = Notes(iterations=4, checkpoint_every=4, over="$1 is spent")
    with pytest.raises(BudgetError, match="after iteration 0"):
        notes_of(notes)
    assert notes.calls[-2:] == [("report", 0), ("checkpoint", 1)]
