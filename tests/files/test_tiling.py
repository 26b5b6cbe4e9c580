from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.files.tiling import (
    input_box,
    slabs,
    tile_count,
    tile_steps,
    tiles,
    whole,
)
from dask_p2p.layout import box_shape


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=4)))
    size = st.lists(st.integers(1, 8), min_size=len(shape), max_size=len(shape))
    return shape, draw(size), draw(size)


mosts = st.integers(0, 750)


@given(grids(), mosts)
def test_each_element_is_in_exactly_one_tile(grid, most):
    shape, unit, prefer = grid
    steps = tile_steps(shape, most, unit, prefer)
    found = list(tiles(whole(shape), steps))
    seen = np.zeros(shape, int)
    for box in found:
        seen[tuple(slice(*side) for side in box)] += 1
    assert (seen == 1).all()
    assert len(found) == tile_count(shape, steps)


@given(grids(), mosts)
def test_tiles_begin_at_units(grid, most):
    shape, unit, prefer = grid
    for box in tiles(whole(shape), tile_steps(shape, most, unit, prefer)):
        assert all(start % u == 0 for (start, _), u in zip(box, unit, strict=True))


@given(grids(), mosts)
def test_tiles_have_few_elements_unless_one_unit_has_more(grid, most):
    shape, unit, prefer = grid
    smallest = tuple(min(n, u) for n, u in zip(shape, unit, strict=True))
    for box in tiles(whole(shape), tile_steps(shape, most, unit, prefer)):
        assert math.prod(box_shape(box)) <= most or all(
            n <= m for n, m in zip(box_shape(box), smallest, strict=True)
        )


def test_one_tile_where_all_fits():
    assert tile_steps((10, 10), 100) == (10, 10)
    assert tile_steps((10, 10), 99) == (5, 10)


def test_tiles_are_even():
    assert tile_steps((10, 10), 90) == (5, 10)


def test_tiles_follow_the_chunks_that_are_read_where_there_is_room():
    assert tile_steps((12, 10), 50, [1, 1], [4, 1]) == (4, 10)
    assert tile_steps((12, 10), 30, [1, 1], [4, 1]) == (3, 10)


def test_a_row_that_is_too_large_is_cut_along_the_next_axis():
    # An image's colours made the first axis: one of three is a third of the file.
    assert tile_steps((3, 8, 8), 32) == (1, 4, 8)


def test_the_input_box_holds_the_same_elements():
    x = np.arange(60).reshape(3, 4, 5)
    band = ((1, 4), (0, 2), (2, 4))
    here = x[tuple(slice(*side) for side in input_box(band, (2, 0, 1)))]
    there = x.transpose(2, 0, 1)[tuple(slice(*side) for side in band)]
    np.testing.assert_array_equal(here.transpose(2, 0, 1), there)


@given(st.integers(0, 50), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_slabs_are_cut_at_units(start, length, unit, parts):
    (sizes,) = slabs(((start, start + length),), (unit,), parts)
    edges = np.cumsum([start, *sizes])
    assert min(sizes) > 0
    assert sum(sizes) == length
    assert len(sizes) <= parts
    assert not (edges[1:-1] % unit).any()


def test_slabs_give_each_worker_about_the_same():
    assert slabs(((0, 10),), (1,), 4) == ((3, 3, 2, 2),)
    assert slabs(((5, 25),), (10,), 4) == ((5, 10, 5),)


@pytest.mark.parametrize(
    ("box", "unit", "wanted"),
    [
        (((0, 8), (0, 9)), (1, 1), ((2, 2, 2, 2), (9,))),  # long runs: cut the first axis
        (((0, 3), (0, 8)), (1, 1), ((3,), (2, 2, 2, 2))),  # enough for each only on the second
        (((0, 8), (0, 9)), (4, 2), ((8,), (4, 2, 2, 1))),  # two chunks on the first axis
        ((), (), ()),
    ],
)
def test_slabs_for_four_workers(box, unit, wanted):
    assert slabs(box, unit, 4) == wanted
