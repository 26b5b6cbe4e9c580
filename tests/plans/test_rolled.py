from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.plans import GridPlan, block_plans
from dask_p2p.plans.fft import Rolled
from tests.plans.support import assembled, blocks_of, elements_read


@st.composite
def rolled_axes(draw):
    old = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    inner = draw(st.lists(st.integers(0, sum(old)), max_size=3))
    new = tuple(b - a for a, b in pairwise(sorted([0, *inner, sum(old)])))
    return Rolled(tuple(old), new, draw(st.integers(-9, 9)))


@given(st.lists(rolled_axes(), min_size=1, max_size=2))
def test_blocks_are_those_of_numpy(axes):
    plan = GridPlan(tuple(range(len(axes))), tuple(axes))
    shape = [sum(axis.src_sizes) for axis in axes]
    x = np.arange(int(np.prod(shape))).reshape(shape)
    rolled = np.roll(x, [axis.shift for axis in axes], range(x.ndim))
    sources = blocks_of(x, tuple(axis.src_sizes for axis in axes))
    expected = blocks_of(rolled, plan.chunks)
    for index, block in block_plans(plan):
        np.testing.assert_array_equal(assembled(block, sources, x.dtype), expected[index])
        assert {*plan.sources(index)} >= {*block.sources}
        assert plan.sources(index) == block.sources
        assert plan.source_elements(index) == elements_read(block)
