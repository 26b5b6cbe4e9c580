from __future__ import annotations

from collections import Counter
from functools import partial
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import block_indices, block_shape, box_shape, box_slices
from dask_p2p.plans.ranks import (
    ORDERS,
    RankGrid,
    distribute_array,
    plan_rank_exchange,
    schedule_partners,
    tree_neighbours,
)
from tests.plans.test_partitions import gangs

sizes = st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple)
all_chunks = st.lists(sizes, min_size=1, max_size=3).map(tuple)


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
