from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import (
    ContiguousRuns,
    Layout,
    box_shape,
    box_size,
    box_slices,
    split_box,
    taper_last,
)


def test_a_layout_counts_elements_in_an_array_of_elements():
    memory = np.arange(7.0)
    first, second = Layout([(2, 2), (3,)]).views(memory, memory.dtype)
    assert first.tolist() == [[0, 1], [2, 3]]
    assert second.tolist() == [4, 5, 6]


boxes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted).map(tuple), max_size=4)


@given(boxes.map(tuple), st.integers(1, 50), st.none() | st.integers(0, 3), st.integers(1, 9))
def test_split_box_covers_it_once_within_the_limit(box, max_elements, axis, least):
    """And keeps runs where it can."""
    runs = () if axis is None else (ContiguousRuns(axis, least),)
    parts = [*split_box(box, max_elements, *runs)]
    count = np.zeros((10,) * len(box), int)
    for part in parts:
        shape = box_shape(part)
        assert 0 < box_size(part) <= max_elements or all(n == 1 for n in shape)
        count[box_slices(part)] += 1
        if axis is not None and axis < len(box) and any(n > 1 for n in shape[1:-1]):
            least_length = min(least, box_shape(box)[axis])
            assert axis != 0 or shape[0] >= least_length or part[0][1] == box[0][1]
    expected = np.zeros_like(count)
    expected[box_slices(box)] = 1
    np.testing.assert_array_equal(count, expected)


def shapes(box, max_elements, *runs):
    return {box_shape(part) for part in split_box(box, max_elements, *runs)}


def test_split_box_cuts_another_axis_where_runs_would_be_too_short():
    box = ((0, 8), (0, 8), (0, 4))
    assert shapes(box, 64) == {(2, 8, 4)}
    assert shapes(box, 64, ContiguousRuns(0, 4)) == {(8, 2, 4)}
    assert shapes(box, 128, ContiguousRuns(0, 4)) == {(4, 8, 4)}
    uneven = split_box(((0, 5), (0, 2), (0, 4)), 32, ContiguousRuns(0, 4))
    assert [box_shape(part) for part in uneven] == [(4, 2, 4), (1, 2, 4)]
    assert shapes(box, 64, ContiguousRuns(2, 4)) == {(2, 8, 4)}
    # Not one whose rows have gaps: nor the last one, if too little of that would be left.
    assert shapes(box, 64, ContiguousRuns(0, 4, 2)) == {(2, 8, 4)}
    long = ((0, 8), (0, 8), (0, 16))
    assert shapes(long, 256, ContiguousRuns(0, 4, 2)) == {(8, 8, 4)}
    assert shapes(long, 256, ContiguousRuns(0, 4, 3)) == {(2, 8, 16)}
    # Whatever lies in one row of the source stays together.
    assert shapes(((0, 8), (0, 8)), 16, ContiguousRuns(0, 8)) == {(2, 8)}
    assert shapes(box, 16, ContiguousRuns(0, 8)) == {(4, 1, 4)}


def test_tapered_parts_keep_runs():
    parts = [*taper_last([((0, 8), (0, 8), (0, 2))], 32, ContiguousRuns(0, 8))]
    assert [box_shape(part) for part in parts] == [(8, 4, 2), (8, 2, 2), (8, 2, 2)]
