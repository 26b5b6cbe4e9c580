import pickle
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import split_evenly
from dask_p2p.plans import block_plans, redistribution
from dask_p2p.plans.fft import FftStage, ReorderedPlan, Transform, plan_stages
from tests.plans.support import assembled, blocks_of, elements_read


@st.composite
def requests(draw):
    """Chunks, a transform, and perhaps chunks of the result."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    chunks = tuple(split_evenly(n, draw(st.integers(1, min(n, 3)))) for n in lengths)
    axes = draw(
        st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=len(lengths), unique=True)
    )
    after = {axis: draw(st.integers(1, 12)) for axis in axes}
    special = draw(st.sampled_from(["first", "last", ""]))
    order = {special: axes[-1]} if special else {}
    transform = Transform(after, **order, item_bytes=(8, 16), is_inverse=draw(st.booleans()))
    final = None
    if draw(st.booleans()):
        ends = [after.get(axis, n) for axis, n in enumerate(lengths)]
        final = tuple(split_evenly(n, draw(st.integers(1, min(n, 3)))) for n in ends)
    return chunks, transform, final


@given(requests())
def test_each_axis_is_transformed_once_where_it_is_whole(request):
    chunks, transform, final = request
    way = plan_stages(chunks, transform, final)
    assert way[0].chunks == chunks
    transformed_axes, shape = [], list(map(sum, chunks))
    for stage in way:
        assert list(map(sum, stage.chunks)) == shape, "an exchange keeps the shape"
        for axis in stage.axes:
            assert len(stage.chunks[axis]) == 1
            shape[axis] = transform.lengths[axis]
        transformed_axes += stage.axes
    assert sorted(transformed_axes) == sorted(transform.lengths)
    # Within a stage the first axis is transformed before the others, and the last after them.
    having = [stage.axes for stage in way if stage.axes]
    assert transform.first is None or transform.first in having[0]
    assert transform.last is None or transform.last in having[-1]
    result = transform.after(way[-1].chunks, frozenset(way[-1].axes))
    assert final is None or result == final


def turned(chunks, lengths, is_inverse):
    """The chunks after a transform along all axes, and how many exchanges that took."""
    transform = Transform(dict(enumerate(lengths)), is_inverse=is_inverse)
    way = plan_stages(chunks, transform)
    return transform.after(way[-1].chunks, frozenset(way[-1].axes)), len(way) - 1


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 5, 2), (5, 4, 3)])
@pytest.mark.parametrize("undivided", [0, 1, 2])
def test_pencils_take_two_exchanges_and_come_back(sizes, undivided):
    chunks = [sizes, (6, 6)] if undivided else [(6, 6), sizes]
    chunks.insert(undivided, (12,))
    forward_chunks, exchanges = turned(tuple(chunks), (12, 12, 12), False)
    assert exchanges == 2
    assert prod(map(len, forward_chunks)) == 6
    assert turned(forward_chunks, (12, 12, 12), True) == (tuple(chunks), 2)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 5, 2), (4, 4, 2, 2), (3, 3, 3, 3), (1, 4, 7)])
def test_slabs_come_back(axis, sizes):
    chunks = tuple(sizes if a == axis else (12,) for a in range(3))
    forward_chunks, _ = turned(chunks, (12, 12, 12), False)
    assert turned(forward_chunks, (12, 12, 12), True) == (chunks, 1)


def fewest(chunks, remaining, exchanges_left):
    """Return the fewest exchanges, `exchanges_left` at most, by trial of all moves."""
    remaining = {axis for axis in remaining if chunks[axis] > 1}
    if not remaining:
        return 0
    if not exchanges_left:
        return 99
    undivided = [axis for axis, n in enumerate(chunks) if n == 1]
    best = 99
    # The target of each remaining divided axis: a whole axis of its own, or none.
    for targets in product([None, *undivided], repeat=len(remaining)):
        used = [target for target in targets if target is not None]
        if not used or len(set(used)) < len(used):
            continue
        new = list(chunks)
        for axis, target in zip(sorted(remaining), targets, strict=True):
            if target is not None:
                new[axis], new[target] = 1, chunks[axis]
        still = {axis for axis in remaining if new[axis] > 1}
        best = min(best, 1 + fewest(new, still, exchanges_left - 1))
    return best


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_no_other_path_takes_fewer_exchanges(ndim):
    for parts in product((1, 2, 3), repeat=ndim):
        if 1 not in parts:
            continue
        chunks = tuple(split_evenly(12, n) for n in parts)
        _, exchanges = turned(chunks, (12,) * ndim, False)
        assert exchanges <= fewest(list(parts), set(range(ndim)), ndim), parts


def test_chunks_of_the_result_that_leave_the_axis_whole_cost_nothing():
    pencils = ((6, 6), (6, 6), (12,))
    transform = Transform({0: 12, 1: 12, 2: 12})
    slabs = ((12,), (12,), (3, 3, 3, 3))
    stages = [FftStage(pencils, (2,)), FftStage(slabs, (0, 1))]
    assert plan_stages(pencils, transform, slabs) == stages


def test_what_halves_goes_first_and_what_grows_last():
    """If two divided axes can move in any order, the one that shrinks moves first."""
    chunks = ((6, 6), (12,), (6, 6))
    first = plan_stages(chunks, Transform({0: 4, 2: 40}))[1]
    assert first.axes == (0,)
    assert plan_stages(chunks, Transform({0: 40, 2: 4}))[1].axes == (2,)


def test_blocks_keep_their_indices_and_have_another_order_in_memory():
    x = np.arange(4 * 6 * 5).reshape(4, 6, 5)
    before, order = ((2, 2), (6,), (3, 2)), (2, 0, 1)
    plan = ReorderedPlan(redistribution(before, order, ((1, 4), (4,), (2, 4))), order)
    assert plan.chunks == ((4,), (2, 4), (1, 4))
    sources, expected = blocks_of(x, before), blocks_of(x, plan.chunks)
    for index, block in block_plans(plan):
        result = assembled(block, sources, x.dtype)
        np.testing.assert_array_equal(result, expected[index].transpose(order))
        assert plan.sources(index) == block.sources
        assert plan.source_elements(index) == elements_read(block)
    assert pickle.loads(pickle.dumps(plan)) == plan
