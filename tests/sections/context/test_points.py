"""Sources and receivers: points between the elements of arrays."""

from itertools import product

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Field, Points, Record, Same, iterate, spmd
from dask_p2p.errors import InputError
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections import Context
from dask_p2p.sections.context.grids import LocalPoints, checked_points
from tests.sections.gangs import run_gang
from tests.sections.iterate.test_coupled import neighbours
from tests.sections.iterate.test_coupled import padded as with_halo

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
SHAPE = (9, 8)
RNG = np.random.default_rng(0)
XY = np.concatenate(
    [
        RNG.uniform(0, [[8], [7]], (2, 20)),
        [[0, 8, 8, 3.5, 4, 4, 4], [0, 7, 2.5, 7, 3, 3, 3.25]],  # corners, edges, one three times
    ],
    axis=1,
)


def added(u, xy, values):
    """Add values to an array, element by element."""
    values = np.broadcast_to(values, xy.shape[1])
    for point, value in zip(xy.T, values, strict=True):
        low = np.floor(point).astype(int)
        for corner in product((0, 1), repeat=u.ndim):
            sides = zip(point - low, corner, strict=True)
            weight = np.prod([f if side else 1 - f for f, side in sides])
            if weight:
                u[tuple(low + corner)] += weight * value
    return u


def sampled(u, xy):
    """Return interpolated values: the transpose of `added`."""
    ones = np.eye(xy.shape[1])
    return np.array([(added(np.zeros(u.shape), xy, one) * u).sum() for one in ones])


def test_neighbours_without_weight_are_not_read():
    """A point on an element: its neighbours may hold anything."""
    u = np.full((3, 4), np.nan)
    u[1, 2], u[1, 3] = 7, 9
    xy = checked_points([[1, 1], [2, 2.5]], (3, 4))
    local, v = LocalPoints(xy, ((0, 3), (0, 4)), np), np.zeros((3, 4))
    assert (len(local), local.sample(u).tolist()) == (2, [7, 8])
    local.add(v, 2.5)
    assert np.array_equal(v, added(np.zeros((3, 4)), xy, 2.5))


def spreads(u, src, rec, at):
    """A step with a source, for a function that returns its new block without halo."""
    new = neighbours(u) / 4
    src.add(new, at.step + np.arange(27.0))
    return {"u": new}


def spreads_out(u, src, at, out):
    out.u[...] = neighbours(u) / 4
    src.add(out.u, at.step + np.arange(27.0))


def spreads_with_halo(u, src, at):
    new = u.copy()
    new[1:-1, 1:-1] = neighbours(u) / 4
    src.add(new, at.step + np.arange(27.0))
    return {"u": new}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("step", [spreads, spreads_out, spreads_with_halo])
def test_sources_and_receivers_of_iterate(client, step, ranks, overlap):
    u = RNG.normal(size=SHAPE)
    field = Field(da.from_array(u, chunks=((2, 3, 4), (5, 3))), boundary="periodic")
    record = {"trace": Record(lambda u, rec: rec.sample(u), shape=(14,))}
    constants = {"src": Points(XY), "rec": Points(XY[:, ::2])}
    options = {"constants": constants, "record": record, "overlap": overlap, "ranks": ranks}
    results, traces = dask.compute(iterate(step, {"u": field}, 1, 4, **options))[0], []
    for number in range(4):
        u = neighbours(np.pad(u, 1, mode="wrap")) / 4
        u = added(u, XY, number + np.arange(27.0))
        traces.append(sampled(u, XY[:, ::2]))
    assert np.array_equal(results["u"], u)
    np.testing.assert_allclose(results["trace"], traces, rtol=1e-12)


@pytest.mark.parametrize(
    ("xy", "message"),
    [
        ([1, 2], r"shape \(2, n\), got one of shape \(2,\)"),
        (np.zeros((3, 4)), r"shape \(2, n\), got one of shape \(3, 4\)"),
        ([[1, 3], [2, 7.5]], r"from 0 to \(8, 7\), got \[3\.0, 7\.5\]"),
        ([[-0.5], [2]], r"got \[-0\.5, 2\.0\]"),
        ([[np.nan], [2]], r"got \[nan, 2\.0\]"),
    ],
)
def test_wrong_points_are_refused(xy, message):
    x = da.zeros(SHAPE, chunks=4)
    with pytest.raises(InputError, match=message):
        iterate(lambda u, src: u, {"u": x}, 0, 2, constants={"src": Points(xy)})


def test_wrong_blocks_and_values_are_refused():
    local = LocalPoints(XY, ((0, 4), (0, 8)), np, [((6, 10), (1, 1)), ((6, 9), (1, 1))])
    local_points = LocalPoints(XY, ((0, 4), (0, 8)), np, [((6, 8), (2, 0)), ((6, 8), (0, 0))])
    blocks = (local, np.zeros((5, 8))), (local, [1]), (local_points, np.zeros((6, 8)))
    for points, block in blocks:
        with pytest.raises(InputError, match=r"block, an array of shape .* without halo"):
            points.sample(block)
    with pytest.raises(InputError, match="one for each of 27 points"):
        local.add(np.zeros((4, 8)), np.zeros(3))


def nearest(xy):
    """Return the nearest elements of points, one by one."""
    indices = [[int(n) + (n % 1 >= 0.5) for n in point] for point in xy.T]
    return np.array(indices, float).T


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_the_nearest_element(client, ranks):
    xy = np.concatenate([XY, [[2.5, 3.5, 0.49], [1.5, 2.49, 6.5]]], axis=1)
    values, u = RNG.normal(size=xy.shape[1]), RNG.normal(size=SHAPE)

    def step(u, points):
        new = u.copy()
        points.add(new, values)
        return {"u": new}

    record = {"seen": Record(lambda u, points: points.sample(u), shape=values.shape)}
    constants, fields = {"points": Points(xy, "nearest")}, {"u": da.from_array(u, chunks=(3, 4))}
    options = {"constants": constants, "record": record, "ranks": ranks}
    (result,) = dask.compute(iterate(step, fields, 0, 1, **options))
    expected = added(u.copy(), nearest(xy), values)
    np.testing.assert_allclose(result["u"], expected, rtol=1e-13)
    np.testing.assert_allclose(result["seen"][0], sampled(expected, nearest(xy)), rtol=1e-13)

    def sample(ctx, u):
        return ctx.allreduce(ctx.points(xy, "nearest").sample(u))

    samples = spmd(sample, da.from_array(u, chunks=(3, 4)), outputs=Same(values), ranks=ranks)
    np.testing.assert_allclose(samples.compute(), sampled(u, nearest(xy)), rtol=1e-13)


GRIDS = pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 3), (2, 2)])
BOUNDARIES = ["periodic", "nearest", "reflect", 0.5]


def ranks_of(grid, shape=(8, 16)):
    return RankGrid(tuple((n // 4, n // 4, n // 2) for n in shape), grid)


def fill_with_columns(rim, inside, at):
    rim[...] = at.index[1]


@GRIDS
def test_blocks_with_halos_are_parts_of_the_padded_array(grid):
    global_array = np.random.default_rng(0).normal(size=(8, 16))

    def padded(ctx):
        local_block = global_array[tuple(slice(*along) for along in ctx.box)]
        before = local_block.copy()
        (top, bottom), (first_column, right) = ctx.box
        for boundary, (rows, columns) in [*product([*BOUNDARIES, "odd"], [(2, 1), (1, 2)])] * 2:
            expected = with_halo(global_array, (rows, columns), boundary)
            expected = expected[top : bottom + 2 * rows, first_column : right + 2 * columns]
            padded_block = ctx.pad(local_block, (rows, columns), boundary)
            assert (padded_block == expected).all()
            padded_block[:] = 0
            assert (local_block == before).all()

    run_gang(ranks_of(grid), padded)


@GRIDS
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_corners_have_the_values_of_the_later_axis(grid, boundary):
    """Indices in the corners are those of the elements whose values belong there."""
    expected = with_halo(np.zeros((8, 16)), (1, 2), [fill_with_columns, boundary])

    def padded(ctx):
        (top, bottom), (first_column, right) = ctx.box
        local_block = np.zeros((bottom - top, right - first_column))
        padded_block = ctx.pad(local_block, (1, 2), {0: fill_with_columns, 1: boundary})
        assert (padded_block == expected[top : bottom + 2, first_column : right + 4]).all()

    run_gang(ranks_of(grid), padded)


@GRIDS
def test_coarser_grids(grid):
    """Points of a coarser grid are with every second point of the finer one."""

    def coarser(ctx):
        fine = ctx.grid_of()
        coarse = fine.coarser(2)
        assert coarse is fine.coarser()
        assert coarse.shape == (4, 8)
        i, j = fine.index
        local_block = (100 * i + j)[::2, ::2]
        assert local_block.shape == coarse.zeros().shape
        k, m = coarse.index
        assert (local_block == 100 * 2 * k + 2 * m).all()
        padded_block = coarse.pad(local_block, 1, "nearest")
        expected = np.pad((100 * np.arange(8)[:, None] + np.arange(16))[::2, ::2], 1, "edge")
        (top, bottom), (first_column, right) = coarse.box
        assert (padded_block == expected[top : bottom + 2, first_column : right + 2]).all()
        assert (coarse.gather(local_block) == expected[1:-1, 1:-1]).all()

    run_gang(ranks_of(grid), coarser)


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


def test_blocks_that_begin_at_odd_positions_have_no_coarser_grid():
    def coarser(ctx):
        grid = ctx.grid_of()
        assert grid.coarser(3).shape == (3,)
        with pytest.raises(InputError, match=r"begin at multiples of 2, got one at 3 along axis"):
            grid.coarser(2)
        for factor in (1, 0, 2.5, None):
            with pytest.raises(InputError, match="factor: expected an integer of at least 2"):
                grid.coarser(factor)

    run_gang(RankGrid(((3, 4),), (2,)), coarser)
