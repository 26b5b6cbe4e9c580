from __future__ import annotations

from itertools import accumulate

import pytest

from dask_p2p.geometry import block_indices
from dask_p2p.plans import group_blocks, redistribution
from dask_p2p.plans.grid import FEW_EDGES, MOST_EDGES, SMALL_GROUP


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
