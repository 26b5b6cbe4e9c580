"""Programs of several fields, as one first writes them, against the same programs in NumPy."""

from functools import partial
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest

from dask_p2p import Field, Whole, iterate
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
RNG = np.random.default_rng(0)
U, V, P = (RNG.normal(size=(24, 20)) for _ in range(3))
CHUNKS = ((7, 5, 12), (9, 11))
MODES = {"periodic": "wrap", "reflect": "symmetric", "nearest": "edge"}
RANKS = [1, 2, 3, 4]


def array(x, chunks=CHUNKS):
    return da.from_array(x, chunks=chunks)


def padded(x, depth=1, boundary="periodic", step=0):
    """Pad a whole array axis by axis, with a boundary for each axis or each side of one."""
    if isinstance(boundary, dict):  # by axis
        boundary = [*boundary.values()]
    kinds = boundary if isinstance(boundary, list) else [boundary] * x.ndim
    depths = depth if isinstance(depth, tuple) else (depth,) * x.ndim
    depths_done = [0] * x.ndim
    for axis, (kind, depth) in enumerate(zip(kinds, depths, strict=False)):
        interior, without = x, [(0, 0)] * x.ndim
        for side, end in enumerate(kind if isinstance(kind, tuple) else (kind, kind)):
            width = [*without]
            width[axis] = (depth, 0) if side == 0 else (0, depth)
            ends = np.pad(interior, width, MODES.get(end, "symmetric"))
            part = slice(depth) if side == 0 else slice(-depth, None)
            rim = ends[(slice(None),) * axis + (part,)]
            if callable(end):
                starts = [-before for before in depths_done]
                starts[axis] = -depth if side == 0 else interior.shape[axis]
                pairs = zip(starts, rim.shape, strict=True)
                index = np.ix_(*(np.arange(start, start + size) for start, size in pairs))
                end(rim, rim.copy(), SimpleNamespace(index=index, step=step))
            elif end == "odd":
                rim *= -1
            elif end not in MODES:
                rim[...] = end
            x = np.concatenate((rim, x) if side == 0 else (x, rim), axis)
        depths_done[axis] = depth
    return x


def inner(a):
    return a[1:-1, 1:-1]


def neighbours(a):
    """Return the sum of the four neighbours of each point."""
    return a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]


def laplacian(a):
    far = a[:-2, :-2] + a[:-2, 2:] + a[2:, :-2] + a[2:, 2:]
    return 0.2 * neighbours(a) + 0.05 * far - inner(a)


def react(u, v, feed=0.03, kill=0.06):
    """Reaction and diffusion of two substances, with nine points."""
    rate = inner(u) * inner(v) ** 2
    return {
        "u": inner(u) + 0.16 * laplacian(u) - rate + feed * (1 - inner(u)),
        "v": inner(v) + 0.08 * laplacian(v) + rate - (feed + kill) * inner(v),
    }


def both(fields, depth, steps, phases, boundary="periodic", **kwargs):
    """Run phases by NumPy, on whole arrays."""
    boundaries = boundary if isinstance(boundary, dict) else {}
    fields = dict(fields)
    for _ in range(steps):
        for phase, names in phases:
            arguments = {
                n: padded(fields[n], depth, boundaries.get(n, boundaries.get("*", boundary)))
                for n in names
            }
            fields |= phase(**arguments, **kwargs)
    return fields


def velocities(p, u, v):
    return {
        "u": inner(u) - 0.1 * (p[2:, 1:-1] - p[:-2, 1:-1]),
        "v": inner(v) - 0.1 * (p[1:-1, 2:] - p[1:-1, :-2]),
    }


def pressure(u, v, p):
    return {"p": inner(p) - 0.1 * (u[2:, 1:-1] - u[:-2, 1:-1] + v[1:-1, 2:] - v[1:-1, :-2])}


BOUNDARIES = [
    "periodic",
    {"p": "nearest", "*": 0.0},
    {"u": {0: ("nearest", 0.5), 1: "reflect"}, "v": {0: 2.0, 1: (0.0, "reflect")}, "p": "periodic"},
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_phases_see_fresh_halos(client, boundary, ranks, overlap):
    fields = {"u": array(U), "v": array(V), "p": array(P)}
    options = {"boundary": boundary, "ranks": ranks, "overlap": overlap}
    (results,) = dask.compute(iterate([velocities, pressure], fields, 1, 6, **options))
    phases = [(velocities, "puv"), (pressure, "uvp")]
    expected = both({"u": U, "v": V, "p": P}, 1, 6, phases, boundary)
    for name, result in results.items():
        assert np.array_equal(result, expected[name]), name


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_time_levels(client, ranks, overlap):
    def leap(w, c2):
        now, before = w
        return {"w": 2 * inner(now) - before + c2 * laplacian(now)}

    fields = {"w": Field([array(U), array(V)], depth=[1, 0])}
    options = {"boundary": 0.0, "ranks": ranks, "overlap": overlap}
    lazy_result = iterate(leap, fields, 5, 7, constants={"c2": abs(P[0]) / 9}, **options)
    now, before = U, V
    for _ in range(7):
        now, before = 2 * now - before + abs(P[0]) / 9 * laplacian(padded(now, 1, 0.0)), now
    newest, older = dask.compute(*lazy_result["w"])
    assert np.array_equal(newest, now)
    assert np.array_equal(older, before)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_constants_are_divided_by_broadcasting(client, ranks, overlap):
    """A mask of the plane for a field of nine populations, and a column."""
    f, solid = RNG.random((9, 24, 20)), RNG.random((24, 20)) > 0.7
    column, table = RNG.random((24, 1)), RNG.random(9)

    def stream(f, solid, column, table, lazy):
        assert solid.shape == f.shape[1:] == lazy.shape
        new = np.stack([np.roll(f[i], (i % 3 - 1, i // 3 - 1), (0, 1)) for i in range(9)])
        return {"f": np.where(solid, f[::-1], new) * column * table[:, None, None] + lazy}

    def local(f, solid, column, table, lazy):
        grown = np.empty((9, f.shape[1] - 2, f.shape[2] - 2))
        for i in range(9):
            dy, dx = i % 3 - 1, i // 3 - 1
            rows = slice(1 - dy, f.shape[1] - 1 - dy)
            grown[i] = f[i, rows, 1 - dx : f.shape[2] - 1 - dx]
        inner = f[::-1, 1:-1, 1:-1]
        assert column.shape == (inner.shape[1], 1)
        assert lazy.shape == inner.shape[1:]
        return {"f": np.where(solid, inner, grown) * column * table[:, None, None] + lazy}

    lazy = RNG.random((24, 20))
    constants = {
        "solid": solid,
        "column": column,
        "table": Whole(da.from_array(table, chunks=4)),
        "lazy": da.from_array(lazy, chunks=5),
    }
    fields = {"f": da.from_array(f, chunks=(9, *CHUNKS))}
    options = {"constants": constants, "ranks": ranks, "overlap": overlap}
    result = iterate(local, fields, {1: 1, 2: 1}, 4, **options)["f"].compute()
    for _ in range(4):
        f = stream(f, solid, column, table, lazy)["f"]
    assert np.array_equal(result, f)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_constant_with_a_halo(client, ranks):
    def carried(c, u):
        flux = np.where(u > 0, c, np.roll(c, -1, 0)) * u
        return {"c": inner(c) - 0.1 * (flux[1:-1, 1:-1] - flux[:-2, 1:-1])}

    constants = {"u": Field(array(U), depth=1, boundary="nearest")}
    lazy_result = iterate(carried, {"c": array(P)}, 1, 5, constants=constants, ranks=ranks)
    assert [*lazy_result] == ["c"]
    c, speed = P, padded(U, 1, "nearest")
    for _ in range(5):
        c = carried(padded(c), speed)["c"]
    assert np.array_equal(lazy_result["c"].compute(), c)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_the_position_of_a_block(client, ranks, overlap):
    """A checkerboard: half of the points in each phase; and a source that depends on the step."""

    def half(s, parity, at):
        assert at.shape == (24, 20)
        assert tuple(stop - start for start, stop in at.box) == inner(s).shape
        is_even = sum(at.index) % 2 == parity
        new = neighbours(s) / 4 + np.cos(at.step)
        return {"s": np.where(is_even, new, inner(s))}

    phases = [partial(half, parity=0), partial(half, parity=1)]
    result = iterate(phases, {"s": array(U)}, 1, 5, ranks=ranks, overlap=overlap)["s"].compute()
    s, index = U, np.ogrid[:24, :20]
    for step in range(5):
        for parity in (0, 1):
            new = neighbours(padded(s)) / 4 + np.cos(step)
            s = np.where(sum(index) % 2 == parity, new, s)
    assert np.array_equal(result, s)


@pytest.mark.parametrize("ranks", [1, 4])
def test_each_field_keeps_its_dtype(client, ranks):
    counts, bits = RNG.integers(0, 9, U.shape), RNG.integers(0, 2, U.shape, dtype=bool)

    def step(x, counts, bits):
        return {"x": x + counts, "counts": counts + bits, "bits": ~bits}

    fields = {"x": array(U.astype("f4")), "counts": array(counts), "bits": array(bits)}
    result = dask.compute(iterate(step, fields, 0, 3, ranks=ranks))[0]
    x = U.astype("f4")
    for _ in range(3):
        x, counts, bits = (x + counts).astype("f4"), counts + bits, ~bits
    for name, expected in {"x": x, "counts": counts, "bits": bits}.items():
        assert result[name].dtype == expected.dtype
        assert np.array_equal(result[name], expected)


def test_fields_that_stay_and_other_parameters(client):
    def step(v, u, scale=2, **rest_by_name):
        assert rest_by_name == {"w": 3}
        return {"v": v + u * scale}

    result = dask.compute(iterate(step, {"u": array(U), "v": array(V)}, 0, 2, ranks=2, w=3))[0]
    assert np.array_equal(result["u"], U)
    assert np.array_equal(result["v"], V + U * 2 + U * 2)


# --- refused


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda u, v: (u, v), r"expected a mapping of new blocks .*'u', 'v'.*got tuple"),
        (lambda u, v: {"w": u}, r"got \['w'\]"),
        (lambda u, v: {}, r"got \[\]"),
        (lambda u, v: u, "got ndarray"),
        (lambda u, v: None, "got NoneType"),
        (lambda u, v: {"u": u[1:]}, "expected an array of shape"),
        (lambda u, v: {"u": u * 1j}, "without loss"),
    ],
)
def test_wrong_results_are_named(client, returned, message):
    y = iterate(returned, {"u": array(U), "v": array(V)}, 0, 2, ranks=2)
    with pytest.raises(BlockMismatchError, match=message):
        y["u"].compute()


def test_corners_that_are_read_are_refused(client):
    fields = {"u": array(U), "v": Field(array(V), corners=False)}
    y = iterate(react, fields, 1, 2, ranks=4)
    with pytest.raises(InputError, match="corners=False"):
        y["u"].compute()


def test_wrong_arguments_are_refused():
    u, v = array(U), array(V)
    fields = {"u": u, "v": v}

    def refused(message, *args, error=InputError, **kwargs):
        with pytest.raises(error, match=message):
            iterate(*args, **kwargs)

    refused("at least one field", react, {}, 1, 2)
    match = "parameters with the names .*got parameter 'w' of the lambda at test_coupled"
    refused(match, lambda u, w: {}, fields, 1, 2)
    refused("neither 'out' nor 'at'", react, {"at": u}, 1, 2)
    refused("name of a parameter for a field, got 3", react, {3: u}, 1, 2)
    refused("different names .*'u' twice", react, fields, 1, 2, constants={"u": 3})
    refused("got 'speed', which no function has", react, fields, 1, 2, speed=3)
    refused("depth: expected names of fields, .*'w'", react, fields, {"w": 1}, 2)
    refused("boundary: expected names", react, fields, 1, 2, boundary={"w": 0.0})
    refused(r"has a halo, got none for \['v'\]", react, fields, 1, 2, boundary={"u": 0.0})
    iterate(react, {"u": u, "v": Field(v, boundary="none")}, 1, 2, boundary={"u": 0.0})
    iterate(react, fields, {"u": 1}, 2, boundary={"u": 0.0})
    refused("until: expected records", react, fields, 1, 2, until=lambda: True)
    refused("'periodic' at both ends", react, fields, 1, 2, boundary={0: ("periodic", 1.0)})
    refused("pair of a function and names", [(react, ("w",))], fields, 1, 2)
    refused("at least one function", [], fields, 1, 2)
    refused("whose parameters Python cannot list", max, fields, 1, 2)
    refused("first one's shape", react, {"u": u, "v": array(V[:5], 5)}, 1, 2, error=InputError)
    refused("broadcasts to", react, fields, 1, 2, constants={"c": V[:5]}, error=InputError)
    for table in (pd.DataFrame(V), Field(pd.DataFrame(V))):
        options = {"constants": {"c": table}, "error": UnsupportedArrayError}
        refused("got 'c' of class DataFrame", react, fields, 1, 2, **options)
    refused("with a halo", react, fields, 1, 2, constants={"c": Field(V[0], 1)}, error=InputError)
    refused("Dask array", react, {"u": U, "v": v}, 1, 2, error=UnsupportedArrayError)
