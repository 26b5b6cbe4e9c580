from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import box_shape, box_slices
from dask_p2p.plans.ranks import partitioned, redistribution_exchange
from tests.plans.test_partitions import gangs


@given(gangs(), st.data())
def test_ranks_that_exchange_their_boxes_have_the_array_in_the_other_partition(gang, data):
    ranks, shape, partition, other_partition, axes = gang
    order = data.draw(st.none() | st.permutations(range(len(axes))))
    x = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
    y = x.transpose(axes)
    before = partitioned(ranks, x.shape, partition)
    after = partitioned(ranks, y.shape, other_partition)
    each = [redistribution_exchange(before, after, axes, rank, order) for rank in range(ranks.size)]
    for rank, own in enumerate(each):
        made = np.zeros(own.after, int)
        for holder, (dst,) in own.receives.items():
            source = x[box_slices(before.box(holder))]
            (src,) = each[holder].sends[rank]
            made[box_slices(dst)] = source[box_slices(src)].transpose(own.axes)
            assert own.shape_before(box_shape(dst)) == box_shape(src)
        for src, dst in own.local:
            source = x[box_slices(before.box(rank))][box_slices(src)]
            made[box_slices(dst)] = source.transpose(own.axes)
        wanted = y[box_slices(after.box(rank))]
        assert np.array_equal(made, wanted if order is None else wanted.transpose(order))
        assert box_shape(before.box(rank)) == own.before
        assert all(rank in each[reader].receives for reader in own.sends)
        assert rank not in {*own.sends, *own.receives}
