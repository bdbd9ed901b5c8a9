"""The order in which drafts are handed out: greedy is optimal, nested, and blind to arrival order."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.core.draft_policies import ExpectedGain, phi
from spotlight.core.explore import DraftPlanner


class KnownCurves(ExpectedGain):
    """Expected gains that are given, at 0, 1, 2 ... more drafts."""

    def __init__(self, steps):
        super().__init__("known", phi("identity"))
        self.steps = steps

    def open(self, book):
        self._gain = np.concatenate([np.zeros((len(self.steps), 1)), np.cumsum(self.steps, axis=1)], axis=1)
        self._at = np.tile(np.arange(self._gain.shape[1], dtype=float), (len(self.steps), 1))
        self._stale = {}


def exact(gain, slots):
    """Best total of `slots` drafts over rows, by dynamic programming."""
    best = np.zeros(slots + 1)
    for curve in gain:
        best = np.array(
            [max(best[s - w] + curve[w] for w in range(min(s, len(curve) - 1) + 1)) for s in range(slots + 1)]
        )
    return best[slots]


def opened(policy, rows, **options):
    planner = DraftPlanner(policy=policy, seed=1, **options)
    planner.open(0, range(rows), [""] * rows, 0, 4, 0.0, 1e6, 4)
    return planner


steps = st.integers(1, 5).flatmap(
    lambda rows: st.lists(
        st.lists(st.integers(1, 1000), min_size=6, max_size=6), min_size=rows, max_size=rows
    )
)


@settings(max_examples=80, deadline=None)
@given(steps, st.integers(1, 12))
def test_greedy_equals_exact_dynamic_programming_on_concave_values(raw, slots):
    concave = -np.sort(-np.array(raw, dtype=float), axis=1)
    policy = KnownCurves(concave)
    planner = opened(policy, len(raw), max_drafts=6)
    drafts = planner.next_drafts(min(slots, 6 * len(raw)), 0.0)
    counts = np.bincount([row for row, _ in drafts], minlength=len(raw))
    total = sum(policy._gain[i, n] for i, n in enumerate(counts))
    assert np.isclose(total, exact(policy._gain, len(drafts)))


@settings(max_examples=40, deadline=None)
@given(steps, st.integers(1, 10), st.integers(1, 10))
def test_a_shorter_order_is_a_prefix_of_a_longer_one(raw, first, second):
    whole = opened(KnownCurves(np.array(raw, dtype=float)), len(raw)).next_drafts(first + second, 0.0)
    parts = opened(KnownCurves(np.array(raw, dtype=float)), len(raw))
    assert parts.next_drafts(first, 0.0) + parts.next_drafts(second, 0.0) == whole


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from(["planner", "uniform", "variance"]))
def test_with_a_fixed_count_the_plan_does_not_depend_on_arrival_order(seed, at_once, policy):
    random = Random(seed)

    def plan(shuffle):
        planner = DraftPlanner(policy=policy, seed=3, drafts_per_prompt=9, control_share=0.1)
        out, plans = [], []
        for iteration in range(3):
            planner.open(iteration, [4, 9, 2], ["a", "b", "a"], iteration * 100, 4, 0.0, 1.0, 2)
            while not planner.complete:
                out += planner.next_drafts(at_once if shuffle else 1, 0.0)
                at = random.randrange(len(out)) if shuffle else 0
                row, number = out.pop(at)
                if shuffle and random.random() < 0.2:
                    planner.draft_returned(row, number)
                    continue
                reward = None if number % 7 == 3 else ((number * 37 + row * 11) % 5) / 4
                planner.draft_done(row, number, reward, 1.0, 0.0)
            plans.append(planner.close(0.0).groups)
        return plans

    assert plan(shuffle=True) == plan(shuffle=False)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["none", "uniform", "std", "variance", "best_worst", "planner"]),
    st.lists(st.sampled_from(["pull", "done", "fail", "back", "fewer", "more", "twice"]), max_size=60),
    st.integers(1, 5),
)
def test_whatever_happens_the_plan_has_k_distinct_seeds_per_row_and_none_is_out_twice(policy, events, k):
    planner = DraftPlanner(policy=policy, seed=0, max_drafts=7, pool=6)
    rows = [7, 3, 5]
    planner.open(2, rows, ["x", "y", "x"], 1000, k, 10.0, 40.0, 2)
    out, done, now = [], [], 10.0
    for event in events:
        now += 0.5
        if event == "pull":
            new = planner.next_drafts(2, now)
            assert not set(new) & (set(out) | set(done))
            assert len(set(new)) == len(new)
            out += new
        elif event in ("done", "fail") and out:
            done.append(out.pop(0))
            planner.draft_done(*done[-1], 0.5 if event == "done" else float("nan"), 0.5, now)
        elif event == "back" and out:
            planner.draft_returned(*out.pop())
        elif event == "twice" and done:
            planner.draft_done(*done[0], 9.0, 1.0, now)
        elif event in ("fewer", "more"):
            planner.set_workers(0 if event == "fewer" else 5, now)
    plan = planner.close(now)
    assert [group.row for group in plan.groups] == rows
    for group in plan.groups:
        assert len(set(group.seeds)) == k
        assert min(group.seeds) >= 1000
        assert set(group.control) <= set(group.seeds)
    assert planner.next_drafts(3, now) == []
