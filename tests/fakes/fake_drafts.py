"""A draft source that holds the scheduler to its side of the contract."""

from __future__ import annotations


class FakeDrafts:
    """Hands out seeds 0, 1, ... of a row; what is returned is the next to be handed out again."""

    def __init__(self, num_drafts: int = 1_000_000, row: int = 7) -> None:
        self.left = num_drafts
        self.row = row
        self.next_seed = 0
        self.returned: list[tuple[int, int]] = []
        self.out: set[tuple[int, int]] = set()
        self.done: dict[tuple[int, int], float | None] = {}

    def reopen(self, num_drafts: int) -> None:
        """Begin with another row; all that was out has been returned by now."""
        assert not self.out
        self.returned = []
        self.row, self.next_seed, self.left = self.row + 1, 0, num_drafts

    def next_drafts(self, max_requests: int, now: float) -> list[tuple[int, int]]:
        given = []
        while len(given) < max_requests and (self.returned or self.left):
            if self.returned:
                draft = self.returned.pop(0)
            else:
                draft = (self.row, self.next_seed)
                self.next_seed, self.left = self.next_seed + 1, self.left - 1
            assert draft not in self.out
            self.out.add(draft)
            given.append(draft)
        return given

    def draft_done(self, row: int, seed: int, reward: float | None, cost_s: float, now: float) -> None:
        self._back(row, seed)
        assert (row, seed) not in self.done
        self.done[row, seed] = reward

    def draft_returned(self, row: int, seed: int) -> None:
        self._back(row, seed)
        self.returned.append((row, seed))

    def _back(self, row: int, seed: int) -> None:
        assert (row, seed) in self.out, f"{row, seed} comes back, but it was not out"
        self.out.remove((row, seed))
