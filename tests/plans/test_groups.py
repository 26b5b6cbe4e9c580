from __future__ import annotations

import pytest

from dask_p2p.layout import block_indices
from dask_p2p.plans import grouped, redistribution
from dask_p2p.plans.groups import LEAST_GROUPS, MOST_EDGES


def edges(plan):
    return sum(len(plan.sources(index)) for index in block_indices(plan.chunks))


def slabs(blocks):
    """A transpose of so many slabs."""
    return redistribution(((2,) * blocks, (2 * blocks,)), (1, 0), ((2,) * blocks, (2 * blocks,)))


def never():
    raise AssertionError("nobody needs to know")


def test_small_graphs_are_left_alone_and_no_cluster_is_asked():
    plan = slabs(141)
    assert edges(plan) <= MOST_EDGES
    assert grouped(plan, None, never) is plan
    assert grouped(slabs(200), 0, never).chunks == slabs(200).chunks


@pytest.mark.parametrize("threads", [4, 100])
def test_large_ones_have_groups_for_all_threads(threads):
    plan = slabs(1000)
    large = grouped(plan, None, lambda: threads)
    groups = len(large.chunks[0])
    assert groups <= max(LEAST_GROUPS, 2 * threads) <= groups * 1.1
    assert edges(large) == 1000 * groups
    assert large.src_chunks == plan.src_chunks
    bounds = set()
    end = 0
    for size in large.chunks[0]:
        end += size
        bounds.add(end)
    assert all(bound % 2 == 0 for bound in bounds), "groups are made of whole blocks"


def test_a_number_that_is_asked_for():
    assert len(grouped(slabs(9), 3, never).chunks[0]) == 3
    assert len(grouped(slabs(10), 4, never).chunks[0]) == 4
    assert grouped(slabs(9), 9, never).chunks == slabs(9).chunks


def test_the_axis_that_saves_most_is_taken():
    plan = redistribution(((1,) * 64, (64,)), (0, 1), ((4,) * 16, (4,) * 16))
    assert [len(sizes) for sizes in grouped(plan, 16, never).chunks] == [16, 1]


def test_no_groups_where_they_save_nothing():
    """Each block reads one other: an edge is an edge."""
    plan = redistribution(((1,) * 30_000,), (0,), ((1,) * 30_000,))
    assert edges(plan) > MOST_EDGES
    assert grouped(plan, None, lambda: 4) is plan
    assert grouped(plan, 10, never) is plan
