from collections import Counter
from itertools import accumulate, product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import block_indices
from dask_p2p.plans import group_blocks, redistribution
from dask_p2p.plans.grid import FEW_EDGES, MOST_EDGES, SMALL_GROUP
from dask_p2p.plugins.placement import max_matching, ranks_for, room


@pytest.mark.parametrize(
    ("units", "needs", "count"),
    [
        ({"GPU": 2}, {"GPU": 1}, 2),
        ({"GPU": 1}, {"GPU": 2}, 0),
        ({}, {"GPU": 1}, 0),
        ({"GPU": 1}, {}, inf),
        ({}, {"GPU": 0}, inf),
        ({"GPU": 1}, {"GPU": 0.1}, 10),
        ({"GPU": 0.3}, {"GPU": 0.1}, 3),
        ({"GPU": 4, "memory": 10e9}, {"GPU": 1, "memory": 4e9}, 2),
    ],
)
def test_ranks_of_a_worker(units, needs, count):
    assert room(units, needs) == count


@pytest.mark.parametrize(
    ("threads", "size_bytes", "count"),
    [
        ([], 1000, 1),  # no cluster
        ([4, 4], 0, 2),
        ([4, 4], 79, 6),  # each of 10 bytes
        ([4, 4], 1000, 8),
        ([1, 4], 40, 3),
    ],
)
def test_ranks_for_an_array(threads, size_bytes, count):
    assert ranks_for(threads, size_bytes, 10) == count


workers = st.sets(st.sampled_from("abcd"), max_size=4).map(frozenset)


@given(
    wants=st.lists(workers, max_size=5),
    rooms=st.fixed_dictionaries({worker: st.integers(0, 2) for worker in "abcd"}),
)
def test_as_many_are_seated_as_by_trying_all_ways(wants, rooms):
    max_seats = 0
    for seats in product(*([*sorted(hosts), None] for hosts in wants)):
        used = Counter(seat for seat in seats if seat)
        if all(used[worker] <= rooms[worker] for worker in used):
            max_seats = max(max_seats, used.total())
    assert max_matching(Counter(wants), rooms) == max_seats


def edges(plan):
    return sum(len(plan.sources(index)) for index in block_indices(plan.chunks))


def slabs(blocks, rows=2):
    """A transpose of some slabs."""
    sizes, side = (rows,) * blocks, rows * blocks
    return redistribution((sizes, (side,)), (1, 0), (sizes, (side,)))


def never():
    raise AssertionError("the name is not needed")


def test_small_graphs_are_left_alone_and_no_cluster_is_asked():
    plan = slabs(44)
    assert edges(plan) <= FEW_EDGES
    assert group_blocks(plan, None, never) is plan
    assert group_blocks(slabs(200), 0, never).chunks == slabs(200).chunks


@pytest.mark.parametrize("blocks", [64, 141])
@pytest.mark.parametrize("rows", [1, 100, 1000])
def test_graphs_of_some_edges_have_groups_where_these_are_small(blocks, rows):
    plan = slabs(blocks, rows)
    assert FEW_EDGES < edges(plan) <= MOST_EDGES
    large = group_blocks(plan, None, lambda: 4)
    sizes = large.chunks[0]
    if large is plan:
        assert 2 * rows * (blocks * rows) > SMALL_GROUP, "two blocks would be small"
    else:
        assert max(sizes) * blocks * rows <= 1.1 * SMALL_GROUP
        assert len(sizes) >= 8
    assert rows > 1 or len(sizes) == 8


@pytest.mark.parametrize(
    ("threads", "rows", "number"),
    [(4, 2, 8), (100, 2, 200), (None, 2, 64), (4, 10, 12), (4, 100, 64)],
)
def test_large_ones_have_groups_for_all_threads(threads, rows, number):
    plan = slabs(1000, rows)
    large = group_blocks(plan, None, lambda: threads)
    groups = len(large.chunks[0])
    assert groups <= number <= groups * 1.1
    assert edges(large) == 1000 * groups
    assert large.src_chunks == plan.src_chunks
    bounds = accumulate(large.chunks[0])
    assert all(bound % rows == 0 for bound in bounds), "groups are made of whole blocks"


def test_a_number_that_is_asked_for():
    assert len(group_blocks(slabs(9), 3, never).chunks[0]) == 3
    assert len(group_blocks(slabs(10), 4, never).chunks[0]) == 4
    assert group_blocks(slabs(9), 9, never).chunks == slabs(9).chunks


def test_no_groups_where_they_save_nothing():
    """Each block reads one other: an edge is an edge."""
    plan = redistribution(((1,) * 30_000,), (0,), ((1,) * 30_000,))
    assert edges(plan) > MOST_EDGES
    assert group_blocks(plan, None, lambda: 4) is plan
    assert group_blocks(plan, 10, never) is plan
