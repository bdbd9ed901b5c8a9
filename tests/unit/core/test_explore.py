import json
import math

import numpy as np
import pytest

from spotlight.core.draft_cost import DraftCost, DraftSetting, TrainingBudget, draft_slots, survival
from spotlight.core.explore import DraftPlanner, make_policy
from spotlight.core.rank_trust import RankTrust, SettingBandit

FAST, FULL = DraftSetting(4, 512, 512), DraftSetting(10, 512, 512)


def opened(rows=(0, 1, 2), k=4, now=0.0, budget_s=100.0, workers=2, iteration=0, first_seed=0, **options):
    planner = DraftPlanner(**{"seed": 1, **options})
    planner.open(iteration, rows, ["a"] * len(rows), first_seed, k, now, budget_s, workers)
    return planner


def draft_all(planner, reward, cost_s=1.0, now=0.0):
    """Answer drafts one by one until no more are given; returns them."""
    made = []
    while new := planner.next_drafts(1, now):
        made += new
        planner.draft_done(*new[0], reward(*new[0]), cost_s, now)
    return made


def test_seeds_count_up_per_row_from_the_first():
    made = draft_all(opened(first_seed=65536, drafts_per_prompt=6), lambda row, seed: 0.5)
    for row in range(3):
        assert sorted(seed for r, seed in made if r == row) == list(range(65536, 65542))


def test_the_kept_seeds_are_the_extremes():
    planner = opened(rows=[5], drafts_per_prompt=10, control_share=0.0)
    draft_all(planner, lambda row, seed: seed / 10)
    assert planner.complete
    assert planner.close(0.0).groups[0].seeds == (0, 1, 8, 9)


def test_missing_drafts_are_filled_with_fresh_seeds_and_failed_ones_are_not_kept():
    planner = opened(rows=[5], k=4)
    (draft,) = planner.next_drafts(1, 0.0)
    planner.draft_done(*draft, None, 1.0, 1.0)
    for _ in range(2):
        (draft,) = planner.next_drafts(1, 1.0)
        planner.draft_done(*draft, 0.5, 1.0, 2.0)
    plan = planner.close(2.0)
    (group,) = plan.groups
    assert group.seeds == (1, 2, 3, 4)
    assert group.num_drafts == 2
    assert plan.stats.failed == 1


def test_without_exploration_every_group_gets_fresh_seeds():
    planner = opened(policy="none", first_seed=200)
    assert planner.next_drafts(8, 0.0) == []
    assert [group.seeds for group in planner.close(1.0).groups] == [(200, 201, 202, 203)] * 3


def test_no_draft_begins_that_would_not_end_in_time():
    planner = opened(budget_s=10.0, workers=1)
    (draft,) = planner.next_drafts(1, 0.0)
    planner.draft_done(*draft, 0.1, 4.0, 4.0)
    assert planner.next_drafts(1, 5.5)
    assert planner.next_drafts(1, 6.5) == []
    plan = planner.close(7.0)
    assert plan.stats.cancelled == 1
    assert plan.stats.overrun == pytest.approx(2.5 / 7.0, rel=0.01)  # begun at 5.5, 4 s long, cut at 7


def test_a_returned_draft_is_the_next_to_be_handed_out():
    planner = opened()
    first, second = planner.next_drafts(2, 0.0)
    planner.draft_returned(*first)
    planner.draft_returned(*first)
    assert planner.next_drafts(1, 1.0) == [first]
    planner.draft_done(*second, 0.3, 1.0, 1.0)
    assert planner.close(2.0).stats.returned == 1


def test_late_repeated_and_unknown_answers_change_nothing():
    planner = opened()
    (draft,) = planner.next_drafts(1, 0.0)
    planner.draft_done(*draft, 0.3, 1.0, 1.0)
    planner.draft_done(*draft, 0.9, 1.0, 1.0)
    planner.draft_done(99, 0, 0.9, 1.0, 1.0)
    planner.draft_done(0, 55, 0.9, 1.0, 1.0)
    assert planner.close(1.0).stats.slots_used == 1
    planner.draft_done(*draft, 0.3, 1.0, 2.0)
    planner.draft_returned(*draft)


def test_the_offer_follows_the_workers():
    planner = opened(workers=2, budget_s=100.0)
    (draft,) = planner.next_drafts(1, 0.0)
    planner.draft_done(*draft, 0.5, 2.0, 2.0)
    planner.set_workers(6, 10.0)
    planner.set_workers(1, 20.0)
    assert planner.close(30.0).stats.slots_offered == (2 * 10 + 6 * 10 + 1 * 10) // 2


def test_drafts_go_where_they_can_still_gain():
    """Of two 0/1 prompts, the one at one half is at its best with k seeds; the rare one is not."""
    planner = opened(rows=[0, 1], k=8, max_drafts=24, budget_s=1e6, control_share=0.0)
    law = {0: lambda seed: float(seed % 2), 1: lambda seed: float(seed % 8 == 0)}
    for _ in range(28):
        (draft,) = planner.next_drafts(1, 0.0)
        planner.draft_done(*draft, law[draft[0]](draft[1]), 1.0, 0.0)
    half, rare = (group.num_drafts for group in planner.close(1.0).groups)
    assert rare >= 18 > 10 >= half


def test_a_new_prompt_is_not_begun_when_its_pilots_no_longer_fit():
    planner = opened(rows=[0, 1], k=8, budget_s=1000.0, workers=1, control_share=0.0)
    for n in range(10):
        (draft,) = planner.next_drafts(1, float(n))
        planner.draft_done(*draft, (draft[1] % 3) / 2, 1.0, n + 1.0)
    begun = draft[0]
    assert {row for row, _ in planner.next_drafts(5, 994.0)} == {begun}


@pytest.mark.parametrize(("name", "favoured"), [("std", 1), ("variance", 1), ("uniform", None)])
def test_baselines_spend_by_their_rule(name, favoured):
    planner = opened(rows=[0, 1], k=4, policy=name, budget_s=1e6)
    for _ in range(24):
        (draft,) = planner.next_drafts(1, 0.0)
        planner.draft_done(*draft, (0.05 if draft[0] == 0 else 1.0) * math.sin(draft[1]), 1.0, 0.0)
    counts = [group.num_drafts for group in planner.close(1.0).groups]
    assert counts == [12, 12] if favoured is None else counts[favoured] > 2 * counts[0]


def test_best_worst_stops_at_its_pool():
    planner = opened(rows=[0, 1], k=4, policy="best_worst", pool=6)
    assert len(draft_all(planner, lambda row, seed: seed / 6)) == 12
    assert all(group.seeds[0] == 0 and group.seeds[-1] == 5 for group in planner.close(1.0).groups)


def test_controls_are_two_percent_over_the_run_and_random_among_drafts():
    planner, controls, kept = DraftPlanner(seed=5, drafts_per_prompt=32), [], 0
    for iteration in range(40):
        planner.open(iteration, range(8), [""] * 8, 0, 8, 0.0, 1.0, 1)
        draft_all(planner, lambda row, seed: seed / 32)
        groups = planner.close(1.0).groups
        kept += sum(len(group.seeds) for group in groups)
        controls += [seed for group in groups for seed in group.control]
    assert len(controls) == math.floor(0.02 * kept)
    assert 10 < np.mean(controls) < 21  # uniform over 0..31; kept extremes have none in 4..27
    assert sum(4 <= seed < 28 for seed in controls) > len(controls) / 2


def run_with_rho(rho, iterations, seed=0, **options):
    planner, rng = DraftPlanner(seed=seed, drafts_per_prompt=16, **options), np.random.default_rng(seed)
    reports = []
    for iteration in range(iterations):
        setting = planner.open(iteration, range(16), [""] * 16, 0, 8, 0.0, 1.0, 1)
        latent = rng.standard_normal((16, 64))
        scale = rng.uniform(0.1, 3.0, 16)
        draft_all(planner, lambda row, seed, x=latent, s=scale: float(s[row] * x[row, seed] + row))
        for group in planner.close(1.0).groups:
            for number in group.seeds:
                final = rho * latent[group.row, number] + math.sqrt(1 - rho**2) * rng.standard_normal()
                planner.finals(group.row, number, scale[group.row] * final + group.row)
        reports.append((setting, planner.report()))
    return reports


@pytest.mark.parametrize("rho", [0.9, 0.5])
def test_rho_is_measured_honestly(rho):
    _, report = run_with_rho(rho, 60)[-1]
    spearman = 6 / math.pi * math.asin(rho / 2)
    assert report.rho.low < spearman < report.rho.high
    assert report.rho.high - report.rho.low < 0.6
    assert report.kept_slope == pytest.approx(rho, abs=0.15)


def test_useless_drafts_switch_exploration_off_and_it_is_tried_again():
    reports = run_with_rho(0.0, 90)
    on = [setting is not None for setting, _ in reports]
    off = on.index(False)
    assert off < 45
    assert "rho" in reports[off][1].note
    assert f"since iteration {off}" in reports[off][1].note
    assert [n for n in range(off, 90) if on[n]] == list(range(off + 20, 90, 20))


def test_good_drafts_are_never_switched_off():
    assert all(setting is not None for setting, _ in run_with_rho(0.9, 60))


def test_report_figures():
    _, report = run_with_rho(1.0, 3)[-1]
    stats = report.stats
    assert stats.slots_used == 16 * 16
    assert stats.kept_variance > 1.3 * stats.random_variance
    assert stats.gain_per_gpu_s == pytest.approx((stats.kept_variance - stats.random_variance) / 256)
    assert report.final_variance == pytest.approx(stats.kept_variance)
    assert report.note == ""
    assert report.final_zero_variance_share == stats.zero_variance_share == 0.0


def test_misuse_is_refused():
    planner = opened()
    with pytest.raises(ValueError, match="still open"):
        planner.open(1, [0], [""], 0, 4, 0.0, 1.0, 1)
    planner.close(0.0)
    with pytest.raises(ValueError, match="no iteration is open"):
        planner.close(0.0)
    for rows, categories, k in [([1, 1], ["", ""], 4), ([1], [], 4), ([1], [""], 0), ([-1], [""], 4)]:
        with pytest.raises(ValueError, match=r"row|categories|k must"):
            DraftPlanner().open(0, rows, categories, 0, k, 0.0, 1.0, 1)
    with pytest.raises(ValueError, match="no policy 'best'"):
        make_policy("best", planner.belief, lambda v: v)
    with pytest.raises(ValueError, match="phi is"):
        DraftPlanner(value="cube")


def test_an_empty_batch_is_a_plan_of_nothing():
    planner = opened(rows=[])
    assert planner.next_drafts(4, 0.0) == []
    assert planner.close(1.0).groups == ()


def test_cost_is_learned_over_settings():
    rng, cost = np.random.default_rng(0), DraftCost()
    assert cost.predict(FAST) is None
    for _ in range(200):
        setting = DraftSetting(int(rng.integers(2, 20)), 512, 512)
        cost.observe(setting, (0.4 + 0.3 * setting.steps) * float(rng.normal(1.0, 0.05)))
    assert cost.predict(FAST) == pytest.approx(1.6, rel=0.05)
    assert cost.predict(FULL) == pytest.approx(3.4, rel=0.05)
    assert 1.02 < cost.high(FULL) / cost.predict(FULL) < 1.15
    for bad in (0.0, -1.0, math.nan, math.inf):
        cost.observe(FULL, bad)
    assert cost.predict(FULL) == pytest.approx(3.4, rel=0.05)


def test_the_budget_is_on_the_safe_side():
    budget, rng = TrainingBudget(), np.random.default_rng(0)
    assert budget.seconds() is None
    over = 0
    for n in range(300):
        training = float(rng.normal(100.0, 5.0))
        if n > 20:
            over += budget.seconds() > training - 8.0
        budget.observe(training, sync_s=8.0)
    assert 0.04 < over / 279 < 0.25
    assert 78.0 < budget.seconds() < 92.0


def test_slots_are_whole_drafts_that_survive():
    assert draft_slots(10.0, 3.0, 4) == 12
    assert draft_slots(10.0, 3.0, 4, survives=0.5) == 4
    assert draft_slots(-1.0, 3.0, 4) == draft_slots(2.9, 3.0, 4) == 0
    assert survival(0.01, 10.0, gpus=2) == pytest.approx(math.exp(-0.2))


def test_the_bandit_takes_cheap_drafts_that_rank_as_well():
    bandit, rng = SettingBandit([FULL, FAST]), np.random.default_rng(0)
    for setting, rho in ((FULL, 0.95), (FAST, 0.93)):
        for _ in range(200):
            x = rng.uniform(-0.5, 0.5)
            bandit.trust[setting].observe(x, rho * x + math.sqrt(1 - rho**2) * rng.uniform(-0.5, 0.5), 0)
    chosen = [bandit.choose({FULL: 1.5, FAST: 3.5}, 1, rng) for _ in range(20)]
    assert chosen == [FAST] * 20
    worthless = SettingBandit([FULL, FAST])
    for _ in range(200):
        worthless.trust[FAST].observe(*rng.uniform(-0.5, 0.5, 2).tolist(), 0)
        x = rng.uniform(-0.5, 0.5)
        worthless.trust[FULL].observe(x, x, 0)
    assert {worthless.choose({FULL: 1.5, FAST: 3.5}, 1, rng) for _ in range(20)} == {FULL}


def test_the_bandit_does_not_flap_between_equals():
    bandit, rng = SettingBandit([FULL, FAST]), np.random.default_rng(0)
    for _ in range(400):
        x = rng.uniform(-0.5, 0.5)
        for setting in (FULL, FAST):
            bandit.trust[setting].observe(x, x + rng.uniform(-0.1, 0.1), 0)
    assert len({bandit.choose({FULL: 2.0, FAST: 2.0}, n, rng) for n in range(20)}) == 1


def test_unused_trust_fades_and_odd_pairs_are_ignored():
    trust = RankTrust()
    for _ in range(50):
        trust.observe(0.3, 0.3, 0)
        trust.observe(-0.3, -0.3, 0)
        trust.observe(math.nan, 0.2, 0)
    fresh, old = trust.rho(0), trust.rho(100)
    assert fresh.low > 0.9
    assert old.high - old.low > 3 * (fresh.high - fresh.low)
    assert old.mean == pytest.approx(0.8, abs=0.01)


def test_state_goes_through_json_and_the_run_goes_on_the_same():
    def iterate(planner, iteration):
        planner.open(iteration, range(6), ["a", "b"] * 3, 0, 4, 0.0, 50.0, 2)
        now = 0.0
        order = []
        while new := planner.next_drafts(1, now):
            now += 0.5
            order += new
            planner.draft_done(*new[0], float((new[0][1] * 7 + new[0][0] + iteration) % 4), 0.9, now)
        plan = planner.close(now)
        for group in plan.groups:
            for seed in group.seeds:
                planner.finals(group.row, seed, float(seed % 3))
        return order, plan, planner.report()

    first = DraftPlanner(seed=2)
    for iteration in range(3):
        iterate(first, iteration)
    second = DraftPlanner(seed=2)
    second.restore(json.loads(json.dumps(first.state())))
    assert iterate(second, 3) == iterate(first, 3)


def test_complete_means_nothing_is_out_and_nothing_more_comes():
    planner = opened(rows=[0], drafts_per_prompt=2)
    first, second = planner.next_drafts(5, 0.0)
    planner.draft_done(*first, 0.1, 1.0, 0.0)
    planner.draft_returned(*second)
    assert not planner.complete
    assert planner.next_drafts(5, 0.0) == [second]
    assert not planner.complete
    planner.draft_done(*second, None, 1.0, 0.0)
    assert planner.complete
    assert opened(policy="none", drafts_per_prompt=2).complete
    pool = opened(rows=[0], policy="best_worst", pool=1, drafts_per_prompt=8)
    draft_all(pool, lambda row, seed: 0.5)
    assert pool.complete


def test_rho_is_learned_also_when_no_one_asks_for_the_report():
    planner = DraftPlanner(seed=0, drafts_per_prompt=16, control_share=0.5)
    for iteration in range(3):
        planner.set_workers(3, 0.0)
        planner.open(iteration, range(8), [""] * 8, 0, 8, 0.0, 1.0, 1)
        draft_all(planner, lambda row, seed: float(seed))
        for group in planner.close(1.0).groups:
            for seed in group.seeds:
                planner.finals(group.row, seed, float(seed))
    assert planner.report().rho.low > 0.9
    assert planner.report().rho.pairs == planner.report().rho.pairs > 40
