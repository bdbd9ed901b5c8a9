"""Which prompts the next batch is made of: every epoch in a new order, those that teach nothing less often.

After GRESO (arXiv 2506.02177): a prompt whose groups have had zero variance several times in a row most
likely has none the next time. It is passed over with a probability that grows with the length of that
run, up to a limit: no prompt is ever dropped for good, for the policy moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class PromptSampler:
    """Batches of dataset rows, without repeats within a batch.

    A row with c zero-variance groups in a row is kept with probability max(`keep ** c`, `floor`);
    `keep = 1` turns that off and gives plain shuffled epochs. Deterministic given the seed.
    """

    def __init__(self, num_rows: int, *, seed: int = 0, keep: float = 0.5, floor: float = 0.05) -> None:
        if num_rows < 1:
            raise ValueError(f"a prompt sampler needs at least one row, got {num_rows}")
        if not (0.0 < floor <= 1.0 and 0.0 < keep <= 1.0):
            raise ValueError(f"keep and floor are in (0, 1], got {keep} and {floor}")
        self.num_rows, self.keep, self.floor = num_rows, keep, floor
        self._seed = seed
        self._epoch = -1
        self._left: list[int] = []
        self._zeros: dict[int, int] = {}
        self.passed_over = 0

    def next_batch(self, size: int) -> list[int]:
        """The next `size` different rows. Raises ValueError for more rows than there are."""
        if not 1 <= size <= self.num_rows:
            raise ValueError(f"a batch of {size} from {self.num_rows} rows")
        batch: list[int] = []
        again: dict[int, None] = {}  # met twice in this batch, across the end of an epoch
        while len(batch) < size:
            row = self._next_row()
            if row in batch:
                again[row] = None
            else:
                batch.append(row)
        self._left = [*again, *self._left]
        return batch

    def observe(self, row: int, *, zero_variance: bool) -> None:
        """Note whether a trained group's rewards were all equal."""
        if zero_variance:
            self._zeros[row] = self._zeros.get(row, 0) + 1
        else:
            self._zeros.pop(row, None)

    def keep_probability(self, row: int) -> float:
        """The probability that the row's turn is not passed over."""
        return max(self.keep ** self._zeros.get(row, 0), self.floor)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain values."""
        zeros = [[row, count] for row, count in sorted(self._zeros.items())]
        return {
            "epoch": self._epoch,
            "left": list(self._left),
            "zeros": zeros,
            "passed_over": self.passed_over,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with the same seed and rows."""
        self._epoch, self.passed_over = int(state["epoch"]), int(state["passed_over"])
        self._left = [int(row) for row in state["left"]]
        self._zeros = {int(row): int(count) for row, count in state["zeros"]}

    def _next_row(self) -> int:
        while True:
            while not self._left:
                self._new_epoch()
            return self._left.pop(0)

    def _new_epoch(self) -> None:
        self._epoch += 1
        rng = np.random.default_rng((self._seed, self._epoch))
        order, luck = rng.permutation(self.num_rows).tolist(), rng.random(self.num_rows).tolist()
        self._left = [row for row in order if luck[row] < self.keep_probability(row)]
        self.passed_over += self.num_rows - len(self._left)
