"""Which prompt the next draft is for: the planner's rule, its baselines, and the oracle.

A policy gives every row of the batch a priority; the highest is pulled next. All drafts of an iteration
cost the same, so that spending the time best is giving out slots, and with concave values greedy is
optimal and nested: cutting the order short anywhere leaves the best plan for what was spent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np

from spotlight.core.belief import RewardBelief
from spotlight.core.draft_book import DraftBook
from spotlight.core.select import Floats, normal_gain, split_variances

Phi: TypeAlias = Callable[[Floats], Floats]
Law: TypeAlias = Callable[[np.random.Generator, tuple[int, int]], Floats]

_REPLICATES = 32
_REFRESH = 8  # rows whose gain is computed anew per pull; bounds the cost of a pull
_PILOTS_OUT = 1e-3  # more drafts of a prompt whose pilots are still out come after all others


def phi(name: str) -> Phi:
    """What a group's variance is worth: "identity", "sqrt", or "cap:<variance>".

    Identity suits advantages normalised over the whole batch, where a group's weight is its variance;
    sqrt and cap suit normalisation per group, where only the first bit of variance matters.
    """
    if name == "identity":
        return lambda variance: variance
    if name == "sqrt":
        return lambda variance: np.asarray(np.sqrt(variance))
    kind, _, value = name.partition(":")
    if kind == "cap" and value:
        limit = float(value)
        return lambda variance: np.minimum(variance, limit)
    raise ValueError(f"phi is identity, sqrt or cap:<variance>, not {name!r}")


class Policy(Protocol):
    """A rule for handing out drafts."""

    name: str
    selector: str

    def open(self, book: DraftBook) -> None:
        """Begin an iteration."""

    def changed(self, i: int) -> None:
        """Row index i has a new reward."""

    def priority(self, book: DraftBook, slots_left: float) -> Floats:
        """Priority per row, shape (rows,); -inf is never. `slots_left` drafts still fit in the budget."""


class _Blind:
    """A rule that looks at no rewards."""

    def open(self, book: DraftBook) -> None:
        """Nothing to prepare."""

    def changed(self, i: int) -> None:
        """Rewards do not matter here."""


class NoDrafts(_Blind):
    """No exploration: random seeds."""

    name, selector = "none", "random"

    def priority(self, book: DraftBook, slots_left: float) -> Floats:
        """Never."""
        return np.full(len(book.rows), -np.inf)


class Uniform(_Blind):
    """The same number for every prompt, in turn."""

    name, selector = "uniform", "max_variance"

    def priority(self, book: DraftBook, slots_left: float) -> Floats:
        """Fewest first."""
        return -book.issued.astype(np.float64)


class FixedPool(Uniform):
    """A pool of fixed size per prompt, the best and the worst kept (Sol-RL)."""

    name, selector = "best_worst", "best_worst"

    def __init__(self, pool: int) -> None:
        self.pool = pool

    def priority(self, book: DraftBook, slots_left: float) -> Floats:
        """Fewest first, up to the pool's size."""
        return np.where(book.issued < self.pool, -book.issued.astype(np.float64), -np.inf)


class _Moments:
    """Pilots in turn, then a score from each prompt's variance and number of drafts."""

    selector = "max_variance"

    def open(self, book: DraftBook) -> None:
        """Forget the last iteration."""
        self._variance = np.zeros(len(book.rows))
        self._stale: set[int] = set()

    def changed(self, i: int) -> None:
        """Remember to compute the row's variance anew."""
        self._stale.add(i)

    def priority(self, book: DraftBook, slots_left: float) -> Floats:
        """Pilots first (fewest first), then by score."""
        for i in self._stale:
            rewards = book.rewards(i)
            self._variance[i] = rewards.var(ddof=1) if len(rewards) > 1 else 0.0
        self._stale.clear()
        pilots = 1e9 - book.issued
        return np.where(book.issued < book.k, pilots, self.score(self._variance, book))

    def score(self, variance: Floats, book: DraftBook) -> Floats:
        """Priority of rows that have their pilots."""
        raise NotImplementedError


class StdProportional(_Moments):
    """Numbers of drafts in proportion to the standard deviation (as highest averages)."""

    name = "std"

    def score(self, variance: Floats, book: DraftBook) -> Floats:
        """Standard deviation over the number of drafts."""
        return np.asarray(np.sqrt(variance) / (book.issued + 1.0))


class VarianceGreedy(_Moments):
    """Where normal rewards of that variance would gain most. Worse than uniform on 0/1 rewards."""

    name = "variance"

    def score(self, variance: Floats, book: DraftBook) -> Floats:
        """Variance times the next step of `normal_gain`."""
        steps = [normal_gain((n + 1) / book.k) - normal_gain(n / book.k) for n in book.issued.tolist()]
        return np.asarray(variance * np.array(steps))


class ExpectedGain:
    """Priority = expected gain of more drafts in phi(V_k), per draft, on the concave majorant.

    For each row, `draws` gives replicates of future rewards. The gain G(w) of w more drafts is the mean of
    phi(V_k(drafts and w draws)) less phi(V_k(drafts)); the first k of a row gain nothing by themselves
    (fresh random seeds would do as well), so that for a new row the majorant decides whether beginning it
    pays in the slots left. With m drafts out, the priority is the steepest slope from G(m) onwards.
    """

    selector = "max_variance"

    def __init__(self, name: str, value: Phi) -> None:
        self.name = name
        self._value = value

    def draws(self, book: DraftBook, i: int, width: int) -> Floats:
        """Replicates of the next rewards of row index i, shape (replicates, width)."""
        raise NotImplementedError

    def open(self, book: DraftBook) -> None:
        """Compute every row's gain once."""
        ahead = [1 << e for e in range((2 * book.k).bit_length())]
        self._ahead = np.array([0, *(a for a in ahead if a < 2 * book.k), 2 * book.k])
        self._at = np.zeros((len(book.rows), len(self._ahead)))
        self._gain = np.zeros_like(self._at)
        self._stale: dict[int, None] = {}
        for begin in range(0, len(book.rows), _REFRESH):
            self._refresh(book, list(range(begin, min(begin + _REFRESH, len(book.rows)))))

    def changed(self, i: int) -> None:
        """Remember to compute the row's gain anew."""
        self._stale[i] = None

    def priority(self, book: DraftBook, slots_left: float) -> Floats:
        """Steepest slope of the gain beyond the drafts that are out."""
        first = list(self._stale)[:_REFRESH]
        for i in first:
            del self._stale[i]
        self._refresh(book, first)
        out = book.waiting().astype(np.float64)
        slopes = self._slopes(out, slots_left)
        pilots_out = (self._at[:, 0] > 0) & (out >= self._at[:, 0])
        return np.where(pilots_out, slopes * _PILOTS_OUT, slopes)

    def _slopes(self, out: Floats, slots_left: float) -> Floats:
        more = self._at - out[:, None]
        within = (more > 0) & (more <= slots_left)
        rise = self._gain - _interpolate(out, self._at, self._gain)[:, None]
        return np.where(within, rise / np.where(within, more, 1.0), 0.0).max(axis=1)

    def _refresh(self, book: DraftBook, indices: list[int]) -> None:
        """Gains of the given rows on the grid "missing pilots + ahead"."""
        if not indices:
            return
        k, grid = book.k, self._ahead
        known = [_extremes(np.sort(book.rewards(i)), k) for i in indices]
        missing = np.array([max(k - len(values), 0) for values in known])
        width = int(missing.max() + grid[-1])
        pool = np.full((len(indices), len(grid), _REPLICATES, 2 * k + width), np.nan)
        for row, (i, values) in enumerate(zip(indices, known, strict=True)):
            pool[row, :, :, : len(values)] = values
            drawn = self.draws(book, i, int(missing[row] + grid[-1]))
            for g, ahead in enumerate(grid):
                w = int(missing[row] + ahead)
                pool[row, g, :, 2 * k : 2 * k + w] = drawn[:, :w]
        pool.sort(axis=-1)
        count = np.array([len(v) for v in known])[:, None] + missing[:, None] + grid
        spread = split_variances(pool, np.repeat(count[:, :, None], _REPLICATES, axis=2), k).max(axis=-1)
        value = self._value(spread).mean(axis=-1)
        self._at[indices] = missing[:, None] + grid
        self._gain[indices] = value - value[:, :1]


class Planner(ExpectedGain):
    """The planner: expected gain under what is believed about each prompt."""

    def __init__(self, belief: RewardBelief, value: Phi) -> None:
        super().__init__("planner", value)
        self._belief = belief

    def draws(self, book: DraftBook, i: int, width: int) -> Floats:
        """Posterior-predictive rewards."""
        return self._belief.draws(
            book.rows[i], book.categories[i], book.rewards(i), book.iteration, (_REPLICATES, width)
        )


class Oracle(ExpectedGain):
    """Expected gain under each prompt's true reward law; only a simulation knows it."""

    def __init__(self, laws: Mapping[int, Law], value: Phi, seed: int = 0) -> None:
        super().__init__("oracle", value)
        self._laws = laws
        self._seed = seed

    def draws(self, book: DraftBook, i: int, width: int) -> Floats:
        """Rewards from the law, with the same random numbers in every call."""
        return self._laws[book.rows[i]](np.random.default_rng(self._seed), (_REPLICATES, width))


def _extremes(ascending: Floats, k: int) -> Floats:
    """All that the best k-subset of these and any further draws can contain: k lowest and k highest."""
    if len(ascending) <= 2 * k:
        return ascending
    return np.concatenate([ascending[:k], ascending[-k:]])


def _interpolate(x: Floats, at: Floats, value: Floats) -> Floats:
    """Row-wise linear interpolation, flat outside; `at` ascends along axis 1."""
    right = np.clip((at <= x[:, None]).sum(axis=1), 1, at.shape[1] - 1)
    rows = np.arange(len(x))
    x0, x1 = at[rows, right - 1], at[rows, right]
    y0, y1 = value[rows, right - 1], value[rows, right]
    return np.asarray(y0 + (y1 - y0) * np.clip((x - x0) / (x1 - x0), 0.0, 1.0))
