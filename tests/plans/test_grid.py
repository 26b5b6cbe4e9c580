from __future__ import annotations

import pickle
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import block_shape, box_shape, box_size, split_evenly
from dask_p2p.plans import block_plans, redistribution, slab_chunks
from dask_p2p.plans.halo import halo_plan
from tests.plans.support import assembled, blocks_of, chunks_of, elements_read


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
def test_plan_gives_the_transpose_and_moves_each_element_once(plan):
    shape = tuple(map(sum, plan.src_chunks))
    x = np.arange(int(np.prod(shape))).reshape(shape)  # each element is its own index
    expected = blocks_of(x.transpose(plan.axes), plan.chunks)
    sources = blocks_of(x, plan.src_chunks)
    for index, block_plan in block_plans(plan):
        np.testing.assert_array_equal(assembled(block_plan, sources, x.dtype), expected[index])


@given(plans())
def test_block_plans_name_each_source_once_and_use_all(plan):
    for index, block_plan in block_plans(plan):
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


def test_the_articles_figure():
    # 1024 x 768 elements in Fortran's words, x fastest: (768, 1024) in NumPy's; four devices.
    chunks = ((192,) * 4, (1024,))
    plan = redistribution(chunks, (1, 0), slab_chunks(chunks, (1, 0)))
    assert plan.chunks == ((256,) * 4, (768,))
    for device in range(4):
        pieces = plan.block((device, 0)).pieces
        assert len(pieces) == 4
        assert {box_shape(piece.src) for piece in pieces} == {(192, 256)}
        assert {box_shape(piece.dst) for piece in pieces} == {(256, 192)}


def test_sizes_of_numpy_become_plain_integers():
    sizes = tuple(np.array([2, 2]))
    block = redistribution((sizes, (4,)), (1, 0), ((4,), sizes)).block((0, 1))
    numbers = [*block.shape, *block.source_shapes[0], *block.pieces[0].src[0]]
    assert {type(number) for number in numbers} == {int}


@given(plans())
def test_no_piece_is_larger_than_the_bound(plan):
    sizes = [box_size(piece.src) for _, block in block_plans(plan) for piece in block.pieces]
    assert max(sizes, default=0) <= plan.largest_piece


def test_blocks_that_read_the_same_sources_share_their_list():
    plan = redistribution(((2,) * 5, (10,)), (1, 0), ((2,) * 5, (10,)))
    assert len({id(plan.sources((i, 0))) for i in range(5)}) == 1
    assert plan.sources((0, 0))[1] == (1, 0)


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


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=3))
def test_default_blocks_are_never_empty_and_as_many_as_can_be(sides):
    src = tuple(split_evenly(length, min(parts, length)) for length, parts in sides)
    axes = tuple(reversed(range(len(src))))
    dst = slab_chunks(src, axes)
    lengths = [length for length, _ in reversed(sides)]
    wanted = max(map(len, src))
    blocks = prod(map(len, dst))
    assert min(min(sizes) for sizes in dst) >= 1
    if lengths[0] >= wanted:
        assert [len(sizes) for sizes in dst] == [wanted] + [1] * (len(src) - 1)
    grids = product(*(range(1, min(length, wanted) + 1) for length in lengths))
    assert blocks == max(n for n in map(prod, grids) if n <= wanted)


def test_equal_plans_are_one_object():
    """Layers of an iteration have equal plans, and each computes its sources once."""
    chunks, named = ((4, 4), (8,)), (((1, 1), (1, 1)), ("periodic", "none"), False, 7)
    assert halo_plan(chunks, *named) is halo_plan(chunks, *named)
    moved = chunks, (1, 0), ((8,), (8,))
    assert redistribution(*moved) is redistribution(*moved)
    large = ((1,) * 200, (1,) * 200), ((1, 1),) * 2, ("none",) * 2
    assert halo_plan(*large) is not halo_plan(*large), "it would stay in memory"


def test_plans_of_equal_constants_with_other_bits_differ():
    plans = [halo_plan(((4,),), ((1, 1),), (end,)) for end in (0.0, -0.0)]
    assert [str(plan.block((0,)).fills[0].value) for plan in plans] == ["0.0", "-0.0"]


@pytest.mark.parametrize("index", [(0, 0), (1, 0)])
def test_sources_without_corners(index):
    plan = halo_plan(((4, 4), (8,)), ((1, 1), (1, 1)), ("periodic",) * 2, has_corners=False)
    block = plan.block(index)
    sizes = [0] * len(block.sources)
    for piece in block.pieces:
        sizes[piece.source] += box_size(piece.src)
    for _ in range(2):  # also from memory
        assert plan.sources(index) == block.sources
        assert plan.source_elements(index) == tuple(sizes)


def test_plans_of_many_edges_are_not_kept_with_their_sources(monkeypatch):
    monkeypatch.setattr("dask_p2p.plans.grid._MOST_SHARED_EDGES", 8)
    rows, columns = ((2, 2, 2), (6,)), ((6,), (2, 2, 2))
    first, again = (redistribution(rows, (0, 1), columns) for _ in range(2))
    assert first == again
    assert first.edges == 9
    first.sources((0, 0))
    assert not again._sources
