from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.errors import InputError
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections import Context
from tests.sections.gangs import run_gang

GRIDS = pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 3), (2, 2)])
MODES = {"periodic": "wrap", "nearest": "edge", "reflect": "symmetric", 0.5: "constant"}


def ranks_of(grid, shape=(8, 16)):
    chunks = tuple((n // 4, n // 4, n // 2) for n in shape)
    return RankGrid(chunks, grid)


@GRIDS
@pytest.mark.parametrize("boundary", MODES)
def test_blocks_with_halos_are_parts_of_the_padded_array(grid, boundary):
    ranks = ranks_of(grid)
    whole = np.random.default_rng(0).normal(size=(8, 16))
    values = {"constant_values": 0.5} if boundary == 0.5 else {}
    wanted = np.pad(whole, ((2, 2), (1, 1)), MODES[boundary], **values)

    def padded(ctx):
        own = whole[tuple(slice(*along) for along in ctx.box)]
        before = own.copy()
        for _ in range(2):
            found = ctx.pad(own, (2, 1), boundary)
            (top, bottom), (left, right) = ctx.box
            assert (found == wanted[top : bottom + 4, left : right + 2]).all()
            found[:] = 0
            assert (own == before).all()
        return True

    assert all(run_gang(ranks, padded))


@GRIDS
def test_coarser_grids(grid):
    """Points of a coarser grid are with every second point of the finer one."""

    def coarser(ctx):
        fine = ctx.grid_of()
        coarse = fine.coarser(2)
        assert coarse is fine.coarser()
        assert coarse.shape == (4, 8)
        i, j = fine.index
        own = (100 * i + j)[::2, ::2]
        assert own.shape == coarse.zeros().shape
        k, m = coarse.index
        assert (own == 100 * 2 * k + 2 * m).all()
        found = coarse.pad(own, 1, "nearest")
        wanted = np.pad((100 * np.arange(8)[:, None] + np.arange(16))[::2, ::2], 1, "edge")
        (top, bottom), (left, right) = coarse.box
        assert (found == wanted[top : bottom + 2, left : right + 2]).all()
        whole = coarse.gather(own)
        assert (whole == wanted[1:-1, 1:-1]).all()
        return True

    assert all(run_gang(ranks_of(grid), coarser))


@GRIDS
def test_arrays_of_other_shapes(grid):
    def other(ctx):
        line = ctx.grid_of((5,))
        assert line is ctx.grid_of([5])
        own = line.index[0] ** 2
        assert line.gather(own).tolist() == [0, 1, 4, 9, 16]
        cube = ctx.grid_of((2, 12, 3), partition=(1,))
        assert cube.box[0] == (0, 2)
        assert cube.gather(cube.zeros("i4")).dtype == "i4"
        assert cube.pad(cube.zeros(), 1, "periodic").ndim == 3
        return True

    assert all(run_gang(ranks_of(grid), other))


def test_blocks_that_begin_at_odd_positions_have_no_coarser_grid():
    def coarser(ctx):
        grid = ctx.grid_of()
        assert grid.coarser(3).shape == (3,)
        with pytest.raises(InputError, match=r"begin at multiples of 2, got one at 3 along axis"):
            grid.coarser(2)
        for factor in (1, 0, 2.5, None):
            with pytest.raises(InputError, match="factor: expected an integer of at least 2"):
                grid.coarser(factor)
        return True

    assert all(run_gang(RankGrid(((3, 4),), (2,)), coarser))


@pytest.fixture
def alone():
    return Context(RankGrid(((4,), (3,)), (1, 1)))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda ctx: ctx.pad(np.zeros((3, 3)), 1), r"a: expected an array of shape \(4, 3\), as"),
        (lambda ctx: ctx.pad({"u": np.zeros(4)}, 1), "u: expected an array of shape"),
        (lambda ctx: ctx.pad(np.zeros((4, 3)), 5), "no wider than the array"),
        (lambda ctx: ctx.pad(np.zeros((4, 3)), 1, "odd one"), "expected a boundary out of"),
        (
            lambda ctx: ctx.pad({"u": np.zeros((4, 3))}, 1, {"v": 0.0}),
            r"boundary: expected names of fields, \['u'\], or '\*' for all others, got 'v'",
        ),
        (
            lambda ctx: ctx.pad(dict.fromkeys("uv", np.zeros((4, 3))), 1, {"v": 0.0}),
            r'boundary: expected one for each of u, v, got none for .* Give the others by "\*"',
        ),
        (lambda ctx: ctx.grid_of((5,)).gather(np.zeros(4)), r"expected an array of shape \(5,\)"),
        (lambda ctx: ctx.grid_of((-5,)), "shape: expected lengths of axes"),
    ],
)
def test_other_blocks_are_refused(alone, call, error):
    with pytest.raises(InputError, match=error):
        call(alone)


def test_nothing_without_arrays(alone):
    assert alone.pad({}, 1) == {}
