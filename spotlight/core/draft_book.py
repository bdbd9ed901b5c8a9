"""The drafts of one iteration: which seeds were given out, came back, with which reward."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spotlight.core.select import Floats, usable_reward


@dataclass(slots=True)
class DraftBook:
    """Drafts by row index and seed number j (the seed itself is `first_seed + j`).

    Seeds are numbered per row, so that which seeds a row gets depends on how many it got and never on
    what other rows did meanwhile. `in_flight[i]` maps j to the time it was given out, `answered[i]` maps j
    to a finite reward, or None for a failed draft.
    """

    iteration: int
    rows: tuple[int, ...]
    categories: tuple[str, ...]
    first_seed: int
    k: int
    cap: int
    index: dict[int, int] = field(init=False)
    issued: NDArray[np.int_] = field(init=False)
    in_flight: list[dict[int, float]] = field(init=False)
    returned: list[tuple[int, int]] = field(init=False, default_factory=list)
    answered: list[dict[int, float | None]] = field(init=False)

    def __post_init__(self) -> None:
        if len(set(self.rows)) != len(self.rows):
            raise ValueError("a row may be in a batch once")
        if len(self.categories) != len(self.rows):
            raise ValueError(f"{len(self.categories)} categories for {len(self.rows)} rows")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")
        if self.first_seed < 0 or any(row < 0 for row in self.rows):
            raise ValueError("rows and seeds are integers >= 0")
        self.index = {row: i for i, row in enumerate(self.rows)}
        self.issued = np.zeros(len(self.rows), dtype=np.int_)
        self.in_flight = [{} for _ in self.rows]
        self.answered = [{} for _ in self.rows]

    def take(self, i: int, now: float) -> tuple[int, int]:
        """Give out the next unused seed of row index i."""
        j = int(self.issued[i])
        self.issued[i] += 1
        self.in_flight[i][j] = now
        return self.rows[i], self.first_seed + j

    def retake(self, now: float) -> tuple[int, int]:
        """Give out again what was given back first."""
        i, j = self.returned.pop(0)
        self.in_flight[i][j] = now
        return self.rows[i], self.first_seed + j

    def give_back(self, row: int, seed: int) -> bool:
        """Take back a draft that was not made; False for one that is not out."""
        found = self._find(row, seed)
        if found is None:
            return False
        del self.in_flight[found[0]][found[1]]
        self.returned.append(found)
        return True

    def answer(self, row: int, seed: int, reward: float | None) -> int | None:
        """Note a draft's reward. Returns the row's index, or None for a draft that is not out."""
        found = self._find(row, seed)
        if found is None:
            return None
        i, j = found
        del self.in_flight[i][j]
        self.answered[i][j] = reward if usable_reward(reward) else None
        return i

    def rewards(self, i: int) -> Floats:
        """Finite draft rewards of row index i in the order of their seeds, whatever order they came in."""
        return np.array([self.answered[i][j] for j in self.usable(i)], dtype=np.float64)

    def usable(self, i: int) -> list[int]:
        """Seed numbers of row index i with a finite reward, ascending."""
        return sorted(j for j, reward in self.answered[i].items() if reward is not None)

    def waiting(self) -> NDArray[np.int_]:
        """Per row the number of drafts given out (or given back since) and not answered."""
        return self.issued - np.array([len(known) for known in self.answered], dtype=np.int_)

    def _find(self, row: int, seed: int) -> tuple[int, int] | None:
        i = self.index.get(row)
        j = seed - self.first_seed
        return (i, j) if i is not None and j in self.in_flight[i] else None
