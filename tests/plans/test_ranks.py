from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import block_indices, block_shape, box_shape
from dask_p2p.plans.ranks import RankGrid

sizes = st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple)
all_chunks = st.lists(sizes, min_size=1, max_size=3).map(tuple)


@given(all_chunks, st.integers(1, 7))
def test_each_block_is_in_one_local_block_once(chunks, most):
    ranks = RankGrid.at_most(chunks, most)
    assert 1 <= ranks.size <= most
    found, cells = [], 0
    for rank in range(ranks.size):
        assert ranks.rank(ranks.indices[rank]) == rank
        assert box_shape(ranks.box(rank)) == ranks.shape(rank)
        own = 0
        for index, box in ranks.blocks(rank):
            found.append(index)
            assert box_shape(box) == block_shape(chunks, index)
            assert all(stop <= n for (_, stop), n in zip(box, ranks.shape(rank), strict=True))
            own += prod(box_shape(box))
        assert own == prod(ranks.shape(rank))
        cells += own
    assert sorted(found) == list(block_indices(chunks))
    assert cells == prod(map(sum, chunks))


def test_blocks_of_a_part():
    ranks = RankGrid.at_most(((3, 3), (1, 2, 3, 4)), 2, partition=(1,))
    assert [ranks.shape(rank) for rank in range(2)] == [(6, 3), (6, 7)]
    assert dict(ranks.blocks(1)) == {
        (0, 2): ((0, 3), (0, 3)),
        (0, 3): ((0, 3), (3, 7)),
        (1, 2): ((3, 6), (0, 3)),
        (1, 3): ((3, 6), (3, 7)),
    }
    assert ranks.box(1) == ((0, 6), (3, 10))


@pytest.mark.parametrize(
    ("chunks", "most", "grid"),
    [
        (((5,) * 4, (5,) * 4), 4, (2, 2)),
        (((5,) * 4, (5,) * 4), 6, (3, 2)),
        (((5,) * 4, (5,) * 4), 7, (3, 2)),  # no grid of seven
        (((1,) * 4, (100,) * 4), 4, (1, 4)),  # the cheaper partition
        (((5,) * 4,), 9, (4,)),
        (((2,) * 2,) * 4, 16, (2, 2, 2, 2)),
    ],
)
def test_the_grid_has_the_smallest_surface(chunks, most, grid):
    assert RankGrid.at_most(chunks, most).grid == grid
