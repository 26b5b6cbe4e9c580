from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.files.tiling import (
    Bands,
    band_of_input,
    cut,
    extents,
    plan_bands,
    slabs,
)

sides = st.integers(1, 40)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=4)))
    size = st.lists(st.integers(1, 8), min_size=len(shape), max_size=len(shape))
    return shape, draw(size), draw(size)


def plan(grid: tuple[tuple[int, ...], list[int], list[int]], budget_bytes: int) -> Bands:
    shape, unit, prefer = grid
    return plan_bands(shape, unit=unit, prefer=prefer, itemsize_bytes=2, budget_bytes=budget_bytes)


@given(grids(), st.integers(0, 3000))
def test_each_element_is_in_exactly_one_band(grid, budget_bytes):
    bands = plan(grid, budget_bytes)
    seen = np.zeros(grid[0], int)
    for band in bands:
        seen[tuple(slice(*side) for side in band)] += 1
    assert (seen == 1).all()
    assert len(list(bands)) == len(bands)


@given(grids(), st.integers(0, 3000))
def test_bands_begin_at_units(grid, budget_bytes):
    _, unit, _ = grid
    for band in plan(grid, budget_bytes):
        assert all(start % u == 0 for (start, _), u in zip(band, unit, strict=True))


@given(grids(), st.integers(0, 3000))
def test_bands_stay_under_the_budget_unless_one_unit_is_over_it(grid, budget_bytes):
    shape, unit, _ = grid
    smallest = tuple(min(n, u) for n, u in zip(shape, unit, strict=True))
    for band in plan(grid, budget_bytes):
        held_bytes = 2 * math.prod(extents(band)) * 2  # input part and output part
        assert held_bytes <= budget_bytes or all(
            n <= m for n, m in zip(extents(band), smallest, strict=True)
        )


def test_one_band_where_all_fits():
    assert len(plan(((10, 10), [3, 3], [1, 1]), 400)) == 1
    assert len(plan(((10, 10), [1, 1], [1, 1]), 399)) == 2


def test_bands_are_even():
    assert plan(((10, 10), [1, 1], [1, 1]), 360).steps == (5, 10)


def test_bands_follow_the_chunks_that_are_read_where_there_is_room():
    assert plan(((12, 10), [1, 1], [4, 1]), 5 * 40).steps == (4, 10)
    assert plan(((12, 10), [1, 1], [4, 1]), 3 * 40).steps == (3, 10)


def test_a_row_that_is_too_large_is_cut_along_the_next_axis():
    # An image's colours made the first axis: one of three is a third of the file.
    assert plan(((3, 8, 8), [1, 1, 1], [1, 1, 1]), 2 * 2 * 8 * 4).steps == (1, 4, 8)


def test_band_of_input_holds_the_same_elements():
    x = np.arange(60).reshape(3, 4, 5)
    band = ((1, 4), (0, 2), (2, 4))
    box = band_of_input(band, (2, 0, 1))
    here = x[tuple(slice(*side) for side in box)]
    there = x.transpose(2, 0, 1)[tuple(slice(*side) for side in band)]
    np.testing.assert_array_equal(here.transpose(2, 0, 1), there)


@given(st.integers(0, 50), sides, st.integers(1, 9), st.integers(1, 9))
def test_cut(start, length, unit, parts):
    sizes = cut(start, start + length, unit, parts)
    edges = np.cumsum([start, *sizes])
    assert min(sizes) > 0
    assert sum(sizes) == length
    assert len(sizes) <= parts
    assert not (edges[1:-1] % unit).any()


def test_cut_gives_each_worker_about_the_same():
    assert cut(0, 10, 1, 4) == (2, 3, 2, 3)
    assert cut(5, 25, 10, 4) == (5, 10, 5)


@pytest.mark.parametrize(
    ("box", "unit", "wanted"),
    [
        (((0, 8), (0, 9)), (1, 1), ((2, 2, 2, 2), (9,))),  # long runs: cut the first axis
        (((0, 3), (0, 8)), (1, 1), ((3,), (2, 2, 2, 2))),  # enough for each only on the second
        (((0, 8), (0, 9)), (4, 2), ((8,), (2, 2, 2, 3))),  # two chunks on the first axis
        ((), (), ()),
    ],
)
def test_slabs_for_four_workers(box, unit, wanted):
    assert slabs(box, unit, 4) == wanted
