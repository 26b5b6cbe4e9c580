from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import box_slices
from dask_p2p.plans.ranks import RankGrid, distribute_array, partition_of

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=5).map(tuple)


@st.composite
def gangs(draw):
    """Ranks of an array, and another partition of it, or of an array of another shape."""
    chunks = draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    ranks = RankGrid.at_most(chunks, draw(st.integers(1, 6)))
    lengths = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
    shape = draw(st.just(tuple(map(sum, chunks))) | lengths)
    axes = st.sets(st.integers(0, len(shape) - 1)).map(lambda partition: tuple(sorted(partition)))
    return ranks, shape, draw(axes), draw(axes), tuple(draw(st.permutations(range(len(shape)))))


@given(gangs())
def test_local_blocks_cover_the_array_once_and_divide_these_axes(gang):
    ranks, shape, partition, *_ = gang
    new = distribute_array(ranks, shape, partition)
    assert new.size == ranks.size
    covered = np.zeros(shape, int)
    for rank in range(new.size):
        covered[box_slices(new.box(rank))] += 1
    assert (covered == 1).all()
    assert {*partition_of(new)} <= ({*partition} if partition else {0})
    divided_axes = [axis for axis in partition_of(new) if axis < len(ranks.grid)]
    if partition and shape == tuple(map(sum, ranks.chunks)):
        for axis in divided_axes:
            if new.grid[axis] == ranks.grid[axis]:
                assert new.local_sizes[axis] == ranks.local_sizes[axis]
        assert distribute_array(ranks, shape, partition_of(ranks)) is ranks


def test_axes_are_divided_so_that_most_ranks_have_something():
    ranks = RankGrid(((1,) * 4,), (4,))
    assert distribute_array(ranks, (8, 8), (0, 1)).grid == (2, 2)
    assert distribute_array(ranks, (1, 8), (0, 1)).grid == (1, 4)
    assert distribute_array(ranks, (2, 3), (0, 1)).grid == (2, 2)
    assert distribute_array(ranks, (3, 1), (0,)).local_sizes == ((1, 1, 1, 0), (1,))
