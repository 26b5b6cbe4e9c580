from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import box_slices
from dask_p2p.plans.frames import interior_and_frames
from dask_p2p.plans.members import Members
from dask_p2p.plans.rims import rims

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
boundaries = st.sampled_from(["none", "periodic", "reflect", "nearest", -7])


@given(data=st.data())
def test_the_interior_reads_no_rims_of_others_and_all_is_covered_once(data):
    chunks = data.draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    shape = tuple(map(sum, chunks))
    members = Members.at_most(chunks, data.draw(st.integers(1, 6)))
    depth = [
        data.draw(st.tuples(*[st.integers(0, min(2, length))] * 2)) for length in shape
    ]  # before, after
    boundary = [data.draw(boundaries) for _ in shape]
    has_corners = data.draw(st.booleans())
    for rank in range(members.size):
        own = rims(members, rank, depth, boundary, has_corners)
        interior, *frames = interior_and_frames(own)
        covered = np.zeros(members.shape(rank), int)
        for box in (interior, *frames):
            covered[box_slices(box)] += 1
        assert (covered == 1).all()
        assert len(frames) <= max(1, 2 * sum(count > 1 for count in members.grid))
        foreign = np.zeros(own.shape, bool)
        for box in (box for boxes in own.receives.values() for box in boxes):
            foreign[box_slices(box)] = True
        reached = [range(-first, last + 1) for first, last in depth]
        for at in product(*(range(*each) for each in interior)):
            for shift in product(*reached):
                if has_corners or sum(map(bool, shift)) <= 1:
                    seen = tuple(
                        start + i + by
                        for (start, _), i, by in zip(own.inner, at, shift, strict=True)
                    )
                    if all(0 <= i < n for i, n in zip(seen, own.shape, strict=True)):
                        assert not foreign[seen]


def test_frames_are_where_rims_come_from_others():
    members = Members(((6, 6), (6, 6)), (2, 1))
    own = rims(members, 0, [(1, 2), (1, 1)], ["periodic"] * 2, True)
    assert interior_and_frames(own) == [
        ((1, 4), (0, 12)),
        ((0, 1), (0, 12)),
        ((4, 6), (0, 12)),
    ]
    ends = rims(members, 0, [(1, 2), (1, 1)], ["none"] * 2, True)
    assert interior_and_frames(ends) == [((0, 4), (0, 12)), ((4, 6), (0, 12))]
    near = Members(((1, 5),), (2,))  # where the array ends within the rim
    assert interior_and_frames(rims(near, 1, [(2, 0)], ["none"], True)) == [((2, 5),), ((0, 2),)]
    narrow = rims(members, 0, [(3, 3), (1, 1)], ["periodic"] * 2, True)
    assert interior_and_frames(narrow) == [((0, 0), (0, 0)), ((0, 6), (0, 12))]
