from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import block_shape
from dask_p2p.plans import block_plans, redistribution, slab_chunks
from dask_p2p.plans.halo import plan_halo
from tests.plans.support import chunks_of, elements_read


@st.composite
def plans(draw):
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    axes = draw(st.permutations(range(len(shape))))
    src = tuple(chunks_of(draw, n) for n in shape)
    if draw(st.booleans()):
        dst = tuple(chunks_of(draw, shape[a]) for a in axes)
    else:
        dst = slab_chunks(src, axes)
    return redistribution(src, axes, dst)


@given(plans())
def test_block_plans_name_each_source_once_and_use_all(plan):
    for index, block_plan in [*block_plans(plan)] * 2:  # the plan keeps what it has counted
        assert plan.source_elements(index) == elements_read(block_plan)
        assert len(set(block_plan.sources)) == len(block_plan.sources)
        assert plan.sources(index) == block_plan.sources
        assert {p.source for p in block_plan.pieces} == set(range(len(block_plan.sources)))
        assert block_plan.shape == block_shape(plan.chunks, index)


@given(plans())
def test_plans_are_values(plan):
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert hash(again) == hash(plan)
    for index, block_plan in block_plans(plan):
        assert pickle.loads(pickle.dumps(block_plan)) == again.block(index)


@pytest.mark.parametrize(
    ("chunks", "axes", "after", "copies"),
    [
        (((2, 2), (4,)), (0, 1), ((2, 1, 1), (4,)), [True, False, False]),
        (((2, 2), (4,)), (0, 1), ((4,), (4,)), [False]),
        (((2, 2), (2,)), (1, 0), ((2,), (2, 2)), [False, False]),  # the axes change
        (((0, 2), (4,)), (0, 1), ((2, 0), (4,)), [True, False]),
    ],
)
def test_blocks_that_stay_as_they_are_are_known(chunks, axes, after, copies):
    blocks = block_plans(redistribution(chunks, axes, after))
    assert [block.is_copy for _, block in blocks] == copies


@pytest.mark.parametrize(
    ("chunks", "axes", "expected"),
    [
        (((4, 4, 4), (5, 5)), (1, 0), ((4, 3, 3), (12,))),
        (((12,), (5, 5)), (1, 0), ((5, 5), (12,))),
        (((2, 2, 2), (2,)), (1, 0), ((2,), (2, 2, 2))),  # too few rows for three slabs
        (((2,) * 6, (3,)), (1, 0), ((1, 1, 1), (6, 6))),
        (((10,) * 8, (80,), (3,)), (2, 1, 0), ((3,), (10,) * 8, (80,))),
        (((1, 1, 1), (4,), (1,)), (2, 0, 1), ((1,), (1, 1, 1), (4,))),
        (((2, 2), (0,)), (1, 0), ((0,), (4,))),
        (((3, 3), (4,), (5,)), (2, 0, 1), ((3, 2), (6,), (4,))),
        (((7, 1, 1),), (0,), ((3, 3, 3),)),
        ((), (), ()),
    ],
)
def test_slab_chunks(chunks, axes, expected):
    assert slab_chunks(chunks, axes) == expected


def test_plans_of_equal_constants_with_other_bits_differ():
    plans = [plan_halo(((4,),), ((1, 1),), (end,)) for end in (0.0, -0.0)]
    assert [str(plan.block((0,)).fills[0].value) for plan in plans] == ["0.0", "-0.0"]
