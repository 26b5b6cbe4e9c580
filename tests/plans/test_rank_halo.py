from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import box_shape, box_slices
from dask_p2p.plans.halo import plan_halo, plan_halo_exchange, split_interior
from dask_p2p.plans.ranks import RankGrid
from tests.plans.support import assembled, blocks_of

sizes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
boundaries = st.sampled_from(["none", "periodic", "reflect", "nearest", -7])


@given(data=st.data())
def test_ranks_that_exchange_halos_have_the_values_of_blocks_with_halos(data):
    chunks = data.draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    shape = tuple(map(sum, chunks))
    ranks = RankGrid.at_most(chunks, data.draw(st.integers(1, 6)))
    widths = [st.tuples(*[st.integers(0, min(3, length))] * 2) for length in shape]
    depth = [data.draw(width) for width in widths]
    boundary = [data.draw(boundaries) for _ in shape]
    has_corners = data.draw(st.booleans())
    x = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
    halos = [plan_halo_exchange(ranks, r, depth, boundary, has_corners) for r in range(ranks.size)]
    halo_arrays = [np.full(halo.shape, -1) for halo in halos]
    for rank, (halo, array) in enumerate(zip(halos, halo_arrays, strict=True)):
        array[box_slices(halo.inner)] = x[box_slices(ranks.box(rank))]
    for rank_halo, array in zip(halos, halo_arrays, strict=True):
        for src, dst in rank_halo.local:
            array[box_slices(dst)] = array[box_slices(src)]
        for fill in rank_halo.fills:
            array[box_slices(fill.dst)] = fill.value
    for rank, (rank_halo, array) in enumerate(zip(halos, halo_arrays, strict=True)):
        for peer, boxes in rank_halo.receives.items():
            given_boxes = halos[peer].sends[rank]
            assert [*map(box_shape, given_boxes)] == [*map(box_shape, boxes)]
            for src, dst in zip(given_boxes, boxes, strict=True):
                array[box_slices(dst)] = halo_arrays[peer][box_slices(src)]
        assert all(rank in halos[peer].receives for peer in rank_halo.sends)
    plan = plan_halo(ranks.local_sizes, depth, boundary, has_corners)
    local_blocks = blocks_of(x, ranks.local_sizes)
    for rank, array in enumerate(halo_arrays):
        expected = assembled(plan.block(ranks.indices[rank]), local_blocks, int)
        for box in halos[rank].unread:
            assert (array[box_slices(box)] == -1).all()
            array[box_slices(box)] = 0
        assert np.array_equal(array, expected)


def test_halos_of_slabs_with_corners_are_as_many_regions_as_without():
    """One region from each neighbor: corners come along with it."""
    ranks = RankGrid(((8, 8, 8), (6,), (5,)), (3, 1, 1))
    for boundary in ("periodic", "reflect", "none", 3):
        lean, full = (
            plan_halo_exchange(ranks, 1, [(1, 1)] * 3, [boundary] * 3, has_corners)
            for has_corners in (False, True)
        )
        for messages in (full.receives, full.sends):
            assert {rank: len(boxes) for rank, boxes in messages.items()} == {0: 1, 2: 1}
        assert len(full.local) == len(lean.local)
        assert len(full.fills) == len(lean.fills)
        # Each message is one piece of memory: whole planes.
        assert full.receives[0] == [((0, 1), (0, full.shape[1]), (0, full.shape[2]))]


@given(data=st.data())
def test_the_interior_reads_no_halos_of_others_and_all_is_covered_once(data):
    chunks = data.draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    shape = tuple(map(sum, chunks))
    ranks = RankGrid.at_most(chunks, data.draw(st.integers(1, 6)))
    depth = [
        data.draw(st.tuples(*[st.integers(0, min(2, length))] * 2)) for length in shape
    ]  # before, after
    boundary = [data.draw(boundaries) for _ in shape]
    has_corners = data.draw(st.booleans())
    for rank in range(ranks.size):
        halo = plan_halo_exchange(ranks, rank, depth, boundary, has_corners)
        interior, *boundary_parts = split_interior([halo])
        covered = np.zeros(ranks.shape(rank), int)
        for box in (interior, *boundary_parts):
            covered[box_slices(box)] += 1
        assert (covered == 1).all()
        assert len(boundary_parts) <= max(1, 2 * sum(count > 1 for count in ranks.grid))
        foreign = np.zeros(halo.shape, bool)
        for box in (box for boxes in halo.receives.values() for box in boxes):
            foreign[box_slices(box)] = True
        reached = [range(-first, last + 1) for first, last in depth]
        for at in product(*(range(*bounds) for bounds in interior)):
            for shift in product(*reached):
                if has_corners or sum(map(bool, shift)) <= 1:
                    window = tuple(
                        start + i + by
                        for (start, _), i, by in zip(halo.inner, at, shift, strict=True)
                    )
                    if all(0 <= i < n for i, n in zip(window, halo.shape, strict=True)):
                        assert not foreign[window]


def test_boundary_parts_are_where_halos_come_from_others():
    ranks = RankGrid(((6, 6), (6, 6)), (2, 1))
    halo = plan_halo_exchange(ranks, 0, [(1, 2), (1, 1)], ["periodic"] * 2, True)
    assert split_interior([halo]) == [((1, 4), (0, 12)), ((0, 1), (0, 12)), ((4, 6), (0, 12))]
    ends = plan_halo_exchange(ranks, 0, [(1, 2), (1, 1)], ["none"] * 2, True)
    assert split_interior([ends]) == [((0, 4), (0, 12)), ((4, 6), (0, 12))]
    near = RankGrid(((1, 5),), (2,))  # the array ends within the halo
    assert split_interior([plan_halo_exchange(near, 1, [(2, 0)], ["none"], True)]) == [
        ((2, 5),),
        ((0, 2),),
    ]
    narrow = plan_halo_exchange(ranks, 0, [(3, 3), (1, 1)], ["periodic"] * 2, True)
    assert split_interior([narrow]) == [((0, 0), (0, 0)), ((0, 6), (0, 12))]
