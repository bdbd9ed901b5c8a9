import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.core.regroup import Limits, Load, legal_degrees, regroup
from spotlight.core.types import Gpu
from spotlight.errors import ConfigError


def scaled(rows, degree):
    """A cost with the usual shape: parallel work, attention in rows squared, a price per extra rank."""
    return (rows + rows**2 / 5000) / (degree * 1000) + 0.02 * (degree - 1)


nodes = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 8), min_size=1, max_size=6)
loads = st.lists(st.builds(Load, st.sampled_from([64, 1024, 6400, 6889]), st.integers(0, 40)), max_size=3)
limits = st.builds(Limits, heads=st.integers(1, 24), max_degree=st.integers(1, 8))


@st.composite
def situations(draw):
    """A cluster, groups that once stood on it (and on lost nodes), and some GPUs gone."""
    every = [Gpu(node, i) for node, n in draw(nodes).items() for i in range(n)]
    former = draw(st.permutations([*every, *[Gpu("lost", i) for i in range(4)]]))
    groups = []
    while former:
        size = draw(st.integers(1, 8))
        groups.append(tuple(former[:size]))
        former = former[size:]
    dead = draw(st.sets(st.sampled_from(every)))
    return [gpu for gpu in every if gpu not in dead], groups[: draw(st.integers(0, len(groups)))]


@given(situations(), loads, limits)
def test_groups_and_spares_are_a_partition_of_the_live(situation, load, limit):
    live, current = situation
    result = regroup(live, current, load, limit, scaled)
    members = [gpu for group in result.groups for gpu in group]
    assert sorted([*members, *result.spares], key=str) == sorted(live, key=str)


@given(situations(), loads, limits)
def test_every_group_has_a_legal_degree(situation, load, limit):
    live, current = situation
    legal, _ = legal_degrees(limit, [part.rows for part in load if part.count])
    for group in regroup(live, current, load, limit, scaled).groups:
        assert len(group) in legal


@given(situations(), loads, limits, st.floats(0, 2))
def test_doing_it_again_changes_nothing(situation, load, limit, move_s):
    live, current = situation
    first = regroup(live, current, load, limit, scaled, move_s=move_s)
    again = regroup(live, first.groups, load, limit, scaled, move_s=move_s)
    assert again.moves == 0
    assert set(again.groups) == set(first.groups)
    assert again.spares == first.spares


@given(situations(), loads, limits)
def test_the_order_in_which_the_live_are_listed_does_not_matter(situation, load, limit):
    live, current = situation
    assert regroup(live, current, load, limit, scaled) == regroup(
        live[::-1] * 2, current, load, limit, scaled
    )


@given(situations(), loads, st.integers(1, 8))
def test_a_group_spans_nodes_only_where_no_node_has_enough(situation, load, degree):
    live, current = situation
    limit = Limits(heads=24, min_rows=1)
    result = regroup(live, current, load, limit, scaled, degree=degree)
    assert all(
        len({gpu.node for gpu in group}) == 1 for group in result.groups
    )  # degree 1 is legal, so never


@given(situations(), st.integers(2, 6))
def test_when_memory_asks_for_more_than_a_node_has_groups_span_nodes(situation, smallest):
    live, _ = situation
    limit = Limits(heads=24, row_bytes=1, gpu_bytes=math.ceil(6400 / smallest), max_degree=smallest)
    result = regroup(live, [], [Load(6400, 10)], limit, scaled)
    assert all(len(group) == smallest for group in result.groups)
    assert len(result.spares) < smallest
    per_node = {}
    for gpu in result.spares:
        per_node[gpu.node] = per_node.get(gpu.node, 0) + 1
    for group in result.groups:
        spread = {gpu.node for gpu in group}
        if len(spread) > 1:  # then each of its nodes gave fewer than a whole group
            assert all(sum(gpu.node == node for gpu in group) < smallest for node in spread)


@given(st.integers(1, 8), st.integers(0, 7))
def test_the_loss_of_one_gpu_moves_no_other_node(degree, lost):
    every = [Gpu(node, i) for node in "abc" for i in range(8)]
    limit = Limits(heads=24, min_rows=1)
    before = regroup(every, [], [], limit, scaled, degree=degree)
    after = regroup(
        [g for g in every if g != Gpu("b", lost)], before.groups, [], limit, scaled, degree=degree
    )
    kept = [group for group in before.groups if all(gpu.node != "b" for gpu in group)]
    assert set(kept) <= set(after.groups)
    assert after.moves < 8
    intact = [g for g in before.groups if len(g) == degree and Gpu("b", lost) not in g]
    assert set(intact) <= set(after.groups)


@given(situations(), loads, limits)
def test_no_choice_is_slower_than_any_fixed_degree(situation, load, limit):
    live, current = situation
    best = regroup(live, current, load, limit, scaled)
    legal, _ = legal_degrees(limit, [part.rows for part in load if part.count])
    for degree in (d for d in legal if d <= len(live)):
        fixed = regroup(live, current, load, limit, scaled, degree=degree)
        assert best.makespan_s <= fixed.makespan_s


@given(situations())
def test_a_change_that_saves_less_than_it_costs_is_not_made(situation):
    live, _ = situation
    limit, load = Limits(heads=24), [Load(6400, 7)]
    before = regroup(live, [], load, limit, scaled, degree=1)
    assert regroup(live, before.groups, load, limit, scaled, move_s=1e9).moves == 0


def test_many_requests_get_single_gpus_and_the_tail_gets_larger_groups():
    live = [Gpu("a", i) for i in range(8)]
    limit = Limits(heads=24)
    many = regroup(live, [], [Load(6400, 64)], limit, scaled)
    tail = regroup(live, many.groups, [Load(6400, 1)], limit, scaled)
    assert [len(group) for group in many.groups] == [1] * 8
    assert max(len(group) for group in tail.groups) == 8
    assert tail.makespan_s < scaled(6400, 1)


@pytest.mark.parametrize(
    ("degree", "rows", "reason"),
    [
        (5, 6400, "exceeds the 4 attention heads"),
        (4, 15, "fewer than 4 each"),
        (9, 6400, "above the allowed 8"),
        (0, 6400, "below 1"),
        (1, 6400, "needs 90.0 GB a GPU, which has 80.0"),
    ],
)
def test_a_degree_that_cannot_work_is_refused_with_the_reason(degree, rows, reason):
    heads = 4 if degree == 5 else 24
    limit = Limits(
        heads=heads, weights_bytes=int(26e9), row_bytes=int(1e7) if degree == 1 else 0, gpu_bytes=int(80e9)
    )
    assert reason in limit.refusal(degree, rows)
    with pytest.raises(ConfigError, match=f"sp_degree {degree}"):
        regroup([Gpu("a", i) for i in range(8)], [], [Load(rows, 1)], limit, scaled, degree=degree)


def test_weights_that_fit_nowhere_are_an_error_that_says_so():
    limit = Limits(heads=24, weights_bytes=int(82e9), gpu_bytes=int(80e9))
    with pytest.raises(ConfigError, match="no sequence-parallel degree works") as caught:
        regroup([Gpu("a")], [], [Load(1024, 1)], limit, scaled)
    assert "82.0 GB" in caught.value.message


def test_nothing_alive_is_no_groups():
    result = regroup([], [(Gpu("a"),)], [Load(64, 1)], Limits(heads=4), scaled)
    assert (result.groups, result.spares, result.moves) == ((), (), 0)
    assert result.makespan_s == math.inf


def test_a_fixed_degree_shrinks_where_gpus_are_missing():
    result = regroup([Gpu("a", i) for i in range(7)], [], [], Limits(heads=24), scaled, degree=4)
    assert sorted(len(group) for group in result.groups) == [3, 4]
