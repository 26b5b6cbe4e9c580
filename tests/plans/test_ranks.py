from collections import Counter
from functools import partial
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import block_indices, block_shape, box_shape, box_slices
from dask_p2p.plans.halo import plan_halo, plan_halo_exchange, split_interior
from dask_p2p.plans.ranks import (
    ORDERS,
    RankGrid,
    distribute_array,
    partition_of,
    plan_rank_exchange,
    schedule_partners,
    tree_neighbours,
)
from tests.plans.support import assembled, blocks_of

sizes = st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple)
all_chunks = st.lists(sizes, min_size=1, max_size=3).map(tuple)


@st.composite
def gangs(draw):
    """Ranks of an array, and another partition of it, or of an array of another shape."""
    ranks = RankGrid.at_most(chunks := draw(all_chunks), draw(st.integers(1, 6)))
    lengths = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
    shape = draw(st.just(tuple(map(sum, chunks))) | lengths)
    axes = st.sets(st.integers(0, len(shape) - 1)).map(lambda partition: tuple(sorted(partition)))
    return ranks, shape, draw(axes), draw(axes), tuple(draw(st.permutations(range(len(shape)))))


@given(all_chunks, st.integers(1, 7))
def test_each_block_is_in_one_local_block_once(chunks, max_ranks):
    ranks = RankGrid.at_most(chunks, max_ranks)
    assert 1 <= ranks.size <= max_ranks
    indices, cells = [], 0
    for rank in range(ranks.size):
        assert ranks.rank(ranks.indices[rank]) == rank
        assert box_shape(ranks.box(rank)) == ranks.shape(rank)
        rank_cells = 0
        for index, box in ranks.blocks(rank):
            indices.append(index)
            assert box_shape(box) == block_shape(chunks, index)
            assert all(stop <= n for (_, stop), n in zip(box, ranks.shape(rank), strict=True))
            rank_cells += prod(box_shape(box))
        assert rank_cells == prod(ranks.shape(rank))
        cells += rank_cells
    assert sorted(indices) == list(block_indices(chunks))
    assert cells == prod(map(sum, chunks))


@pytest.mark.parametrize(
    ("chunks", "max_ranks", "grid"),
    [
        (((5,) * 4, (5,) * 4), 4, (2, 2)),
        (((5,) * 4, (5,) * 4), 6, (3, 2)),
        (((5,) * 4, (5,) * 4), 7, (3, 2)),  # no grid of seven
        (((1,) * 4, (100,) * 4), 4, (1, 4)),  # the cheaper partition
        (((5,) * 4,), 9, (4,)),
        (((2,) * 2,) * 4, 16, (2, 2, 2, 2)),
    ],
)
def test_the_grid_has_the_smallest_surface(chunks, max_ranks, grid):
    assert RankGrid.at_most(chunks, max_ranks).grid == grid


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("size", range(1, 18))
def test_each_pair_comes_once_and_no_rank_twice_in_a_stage(order, size):
    partners_by_rank = [schedule_partners(order, rank, size) for rank in range(size)]
    assert len({*map(len, partners_by_rank)}) == 1, "all have as many stages"
    pairs = Counter()
    for stage in zip(*partners_by_rank, strict=True):
        sent = [(rank, to) for rank, (to, _) in enumerate(stage) if to is not None]
        received = [(source, rank) for rank, (_, source) in enumerate(stage) if source is not None]
        assert sorted(sent) == sorted(received)
        assert len({to for _, to in sent}) == len(sent)
        pairs.update(sent)
    assert pairs == Counter((a, b) for a in range(size) for b in range(size) if a != b)


@pytest.mark.parametrize("size", [1, 2, 3, 9, 10, 73, 74, 1000])
def test_a_tree_has_all_ranks_and_few_connections_of_each(size):
    branches = [tree_neighbours(rank, size) for rank in range(size)]
    assert branches[0][0] == []
    for rank, (above, below) in enumerate(branches):
        assert all(branches[child][0] == [rank] for child in below)
        assert all(rank in branches[parent][1] and parent < rank for parent in above)
        assert len(above) + len(below) <= 9
    assert sum(len(below) for _, below in branches) == size - 1


@given(gangs(), st.data())
def test_ranks_that_exchange_their_boxes_have_the_array_in_the_other_partition(gang, data):
    ranks, shape, partition, other_partition, axes = gang
    order = data.draw(st.none() | st.permutations(range(len(axes))))
    x = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
    y = x.transpose(axes)
    before = distribute_array(ranks, x.shape, partition)
    after = distribute_array(ranks, y.shape, other_partition)
    exchange_of = partial(plan_rank_exchange, before, after, axes, order=order)
    exchanges = [exchange_of(rank) for rank in range(ranks.size)]
    for rank, exchange in enumerate(exchanges):
        target = np.zeros(exchange.after, int)
        for holder, (dst,) in exchange.receives.items():
            source = x[box_slices(before.box(holder))]
            (src,) = exchanges[holder].sends[rank]
            target[box_slices(dst)] = source[box_slices(src)].transpose(exchange.axes)
            assert exchange.shape_before(box_shape(dst)) == box_shape(src)
        for src, dst in exchange.local:
            source = x[box_slices(before.box(rank))][box_slices(src)]
            target[box_slices(dst)] = source.transpose(exchange.axes)
        expected = y[box_slices(after.box(rank))]
        assert np.array_equal(target, expected if order is None else expected.transpose(order))
        assert box_shape(before.box(rank)) == exchange.before
        assert all(rank in exchanges[reader].receives for reader in exchange.sends)
        assert rank not in {*exchange.sends, *exchange.receives}


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
    uneven = RankGrid(((3, 5), (4,)), (2, 1))
    assert distribute_array(uneven, (8, 2), (0,)).local_sizes == ((3, 5), (2,)), "the same rows"


boundaries = st.sampled_from(["none", "periodic", "reflect", "nearest", -7])


@st.composite
def halo_cases(draw, max_depth):
    """Ranks of an array, and depths, boundaries and corners of halos."""
    ranks = RankGrid.at_most(draw(all_chunks), draw(st.integers(1, 6)))
    shape = tuple(map(sum, ranks.chunks))
    widths = [st.tuples(*[st.integers(0, min(max_depth, length))] * 2) for length in shape]
    depth = [draw(width) for width in widths]  # before, after
    return ranks, shape, depth, [draw(boundaries) for _ in shape], draw(st.booleans())


@given(halo_cases(3))
def test_ranks_that_exchange_halos_have_the_values_of_blocks_with_halos(case):
    ranks, shape, depth, boundary, has_corners = case
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
        assert (len(full.local), len(full.fills)) == (len(lean.local), len(lean.fills))
        # Each message is one piece of memory: whole planes.
        assert full.receives[0] == [((0, 1), (0, full.shape[1]), (0, full.shape[2]))]


@given(halo_cases(2))
def test_the_interior_reads_no_halos_of_others_and_all_is_covered_once(case):
    ranks, _, depth, boundary, has_corners = case
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
    end = plan_halo_exchange(near, 1, [(2, 0)], ["none"], True)
    assert split_interior([end]) == [((2, 5),), ((0, 2),)]
    narrow = plan_halo_exchange(ranks, 0, [(3, 3), (1, 1)], ["periodic"] * 2, True)
    assert split_interior([narrow]) == [((0, 0), (0, 0)), ((0, 6), (0, 12))]
