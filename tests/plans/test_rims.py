from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import box_shape, box_slices
from dask_p2p.plans.halo import halo_plan
from dask_p2p.plans.members import Members
from dask_p2p.plans.rims import rims

sizes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
boundaries = st.sampled_from(["none", "periodic", "reflect", "nearest", -7])


@given(data=st.data())
def test_members_that_exchange_their_rims_have_what_blocks_with_rims_have(data):
    chunks = data.draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    shape = tuple(map(sum, chunks))
    members = Members.at_most(chunks, data.draw(st.integers(1, 6)))
    widths = [st.tuples(*[st.integers(0, min(3, length))] * 2) for length in shape]
    depth = [data.draw(width) for width in widths]
    boundary = [data.draw(boundaries) for _ in shape]
    has_corners = data.draw(st.booleans())
    x = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
    all_rims = [rims(members, r, depth, boundary, has_corners) for r in range(members.size)]
    padded = [np.full(each.shape, -1) for each in all_rims]
    for rank, (own, array) in enumerate(zip(all_rims, padded, strict=True)):
        array[box_slices(own.inner)] = x[box_slices(members.box(rank))]
    for rank, (own, array) in enumerate(zip(all_rims, padded, strict=True)):
        for fill in own.fills:
            array[box_slices(fill.dst)] = fill.value
        for src, dst in own.local:
            array[box_slices(dst)] = array[box_slices(src)]
        for peer, boxes in own.receives.items():
            given_boxes = all_rims[peer].sends[rank]
            assert [*map(box_shape, given_boxes)] == [*map(box_shape, boxes)]
            for src, dst in zip(given_boxes, boxes, strict=True):
                array[box_slices(dst)] = padded[peer][box_slices(src)]
        assert all(rank in all_rims[peer].receives for peer in own.sends)
    plan = halo_plan(members.share_sizes, depth, boundary, has_corners)
    for rank, array in enumerate(padded):
        block = plan.block(members.places[rank])
        wanted = np.zeros(block.shape, int)
        for piece in block.pieces:
            source = x[box_slices(members.box(members.rank(block.sources[piece.source].block)))]
            wanted[box_slices(piece.dst)] = source[box_slices(piece.src)]
        for fill in block.fills:
            wanted[box_slices(fill.dst)] = fill.value
        assert np.array_equal(array, wanted)
