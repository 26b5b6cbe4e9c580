from __future__ import annotations

import doctest
import pickle
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p import plan as plan_module
from dask_p2p.layout import (
    block_bounds,
    block_indices,
    block_shape,
    box_shape,
    box_slices,
    split_evenly,
)
from dask_p2p.plan import Plan, slab_chunks, stage_order, transpose_plan


def test_examples_in_docstrings():
    results = doctest.testmod(plan_module)
    assert results.attempted >= 2
    assert results.failed == 0


def cut(draw, length):
    """Cut an axis into blocks, empty ones included."""
    inner = draw(st.lists(st.integers(0, length), max_size=3))
    bounds = [0, *sorted(inner), length]
    return tuple(b - a for a, b in pairwise(bounds))


@st.composite
def plans(draw):
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    axes = draw(st.permutations(range(len(shape))))
    src = tuple(cut(draw, n) for n in shape)
    if draw(st.booleans()):
        dst = tuple(cut(draw, shape[a]) for a in axes)
    else:
        dst = slab_chunks(src, axes)
    return Plan(src, dst, tuple(axes))


def blocks_of(array, chunks):
    bounds = [block_bounds(sizes) for sizes in chunks]
    return {
        index: array[tuple(slice(b[i], b[i + 1]) for b, i in zip(bounds, index, strict=True))]
        for index in block_indices(chunks)
    }


@given(plans())
def test_plan_gives_the_transpose_and_moves_each_element_once(plan):
    shape = tuple(map(sum, plan.src_chunks))
    x = np.arange(int(np.prod(shape))).reshape(shape)  # each cell says where it comes from
    expected = blocks_of(x.transpose(plan.axes), plan.dst_chunks)
    sources = blocks_of(x, plan.src_chunks)
    assert list(plan.indices()) == list(expected)
    for index, block_plan in plan.blocks():
        out = np.full(block_plan.shape, -1)
        written = np.zeros(block_plan.shape, int)
        for piece in block_plan.pieces:
            source = sources[block_plan.sources[piece.source]]
            assert source.shape == block_plan.source_shapes[piece.source]
            region = source[box_slices(piece.src)]
            assert region.shape == box_shape(piece.src)  # nothing was clipped
            assert region.size > 0
            out[box_slices(piece.dst)] = region.transpose(block_plan.axes)
            written[box_slices(piece.dst)] += 1
        assert (written == 1).all()
        np.testing.assert_array_equal(out, expected[index])


@given(plans())
def test_block_plans_name_each_source_once_and_use_all(plan):
    for index, block_plan in plan.blocks():
        assert len(set(block_plan.sources)) == len(block_plan.sources)
        assert plan.sources(index) == list(block_plan.sources)
        assert {p.source for p in block_plan.pieces} == set(range(len(block_plan.sources)))
        assert block_plan.shape == block_shape(plan.dst_chunks, index)


@given(plans())
def test_plans_are_values(plan):
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert hash(again) == hash(plan)
    for index, block_plan in plan.blocks():
        assert pickle.loads(pickle.dumps(block_plan)) == again.block(index)


def test_the_articles_figure():
    # 1024 x 768 elements in Fortran's words, x fastest: (768, 1024) in NumPy's; four devices.
    chunks = ((192,) * 4, (1024,))
    plan = transpose_plan(chunks, (1, 0), slab_chunks(chunks, (1, 0)))
    assert plan.dst_chunks == ((256,) * 4, (768,))
    for device in range(4):
        pieces = plan.block((device, 0)).pieces
        assert len(pieces) == 4
        assert {box_shape(piece.src) for piece in pieces} == {(192, 256)}
        assert {box_shape(piece.dst) for piece in pieces} == {(256, 192)}


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
    cuts = product(*(range(1, min(length, wanted) + 1) for length in lengths))
    assert blocks == max(n for n in map(prod, cuts) if n <= wanted)


names = st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=9, unique=True)


@given(names)
def test_at_each_stage_every_holder_serves_one_reader(workers):
    orders = [stage_order(workers, worker) for worker in workers]
    for worker, order in zip(workers, orders, strict=True):
        assert order[0] == worker
        assert sorted(order) == sorted(workers)
    for stage in zip(*orders, strict=True):
        assert len(set(stage)) == len(workers)


def test_a_reader_without_blocks_starts_behind_its_place():
    assert stage_order(["a", "c", "e"], "d") == ["e", "a", "c"]
    assert stage_order(["a", "c", "e"], "z") == ["a", "c", "e"]


def test_sizes_of_numpy_become_plain_integers():
    sizes = tuple(np.array([2, 2]))
    block = transpose_plan((sizes, (4,)), (1, 0), ((4,), sizes)).block((0, 1))
    numbers = [*block.shape, *block.source_shapes[0], *block.pieces[0].src[0]]
    assert {type(number) for number in numbers} == {int}
