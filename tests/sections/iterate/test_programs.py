"""Programs as one first writes them: right by default, or refused in their first step."""

import warnings

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from tests.sections.iterate.test_coupled import padded
from tests.support import mostly_slow

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
RNG = np.random.default_rng(0)
FLOATS, BITS = RNG.normal(size=(24, 30)), RNG.integers(0, 2, (24, 30), dtype="u1")


def cut(x, chunks=(6, 15)):
    return da.from_array(x, chunks=chunks)


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16", "i4", "u1", "?", "i8"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_corners_that_are_asked_not_to_be_exchanged(client, dtype, ranks):
    """A function that reads them is refused; a star is right."""

    def star(u, out):
        out[...] = u[2:, 1:-1] | u[:-2, 1:-1] if u.dtype.kind in "bui" else u[2:, 1:-1]

    def corner(u, out):
        out[...] = u[2:, 2:]

    def returned(u):
        return u[:-2, 2:]

    x = BITS.astype(dtype)
    y = iterate(star, cut(x), 1, 3, corners=False, ranks=ranks)
    assert np.array_equal(y.compute(), reference(star, [x], 1, 3, "periodic")[0])
    for function in (corner, returned):
        y = iterate(function, cut(x), 1, 3, corners=False, ranks=ranks)
        with pytest.raises(InputError, match=r"corners=False: expected .* Leave corners=False out"):
            y.compute()


def computed(y):
    return y.compute(scheduler="sync")


def test_several_new_arrays_are_refused():
    def coupled(u, v):
        return u + v, u - v

    def listed(u, v):
        return [u + v, u - v]

    def filled(u, v, out):
        out[...] = u + v
        return u - v

    fields = (cut(FLOATS), cut(FLOATS))
    for until in (None, lambda *numbers: False):
        for function in (coupled, filled):
            y, _ = iterate(function, fields, 0, 2, ranks=1, until=until)
            with pytest.raises(BlockMismatchError, match=r"expected one new array .*by name"):
                computed(y)
    with pytest.raises(BlockMismatchError, match="from the function, got list"):
        computed(iterate(listed, fields, 0, 2, ranks=1)[0])


def test_numbers_without_until_are_refused():
    def returning(u):
        return u, 1.0

    def filling(u, out):
        out[...] = u
        return 1.0

    for function in (returning, filling):
        with pytest.raises(BlockMismatchError, match=r"got 1 more value\. Give .*until="):
            computed(iterate(function, cut(FLOATS), 0, 2, ranks=1))
        y = iterate(function, cut(FLOATS), 0, 2, ranks=1, until=lambda number: False)
        assert np.array_equal(computed(y), FLOATS)


def test_numbers_that_are_none():
    for number in ("text", None):
        y = iterate(lambda u, w=number: (u, w), cut(FLOATS), 0, 2, ranks=1, until=lambda n: True)
        with pytest.raises(BlockMismatchError, match="expected numbers for until="):
            computed(y)
    y = iterate(lambda u: (u, np.ones(3)), cut(FLOATS), 0, 2, ranks=1, until=lambda n: True)
    with pytest.raises(BlockMismatchError, match=r"another array of shape \(3,\)"):
        computed(y)


@pytest.mark.parametrize("dtype", ["i8", "i4", "u1", "?"])
def test_fractions_in_fields_of_integers_are_refused(dtype):
    x = np.zeros((6, 8), dtype)  # the first step makes no fractions
    x[3, 4] = 4

    def whole(u, out):
        out[...] = (u[2:] + 0.0 + u[:-2]) / 2

    def in_parts(u, out):
        out[:2] = 0.5 * u[1:3]
        out[2:] = 1

    def of_views(u, out):
        half = out[: len(out) // 2]
        half[...] = np.sqrt(u[1 : len(half) + 1])
        out[len(half) :] = 0

    for function in (whole, in_parts, of_views):
        y = iterate(function, cut(x, (3, 4)), {0: 1}, 3, ranks=1)
        with pytest.raises(BlockMismatchError, match=rf"converted to {x.dtype} without .*dtype="):
            computed(y)
        y = iterate(function, cut(x, (3, 4)), {0: 1}, 3, ranks=1, dtype=float)
        (expected,) = reference(function, [x.astype(float)], 1, 3, ["periodic"])
        assert np.array_equal(computed(y), expected)


def test_fractions_that_compiled_code_fills_in_are_refused():
    """It writes to memory, of whatever type it is."""

    def into_memory(u, out):
        values = 0.75 * u[1:-1]
        plain = np.asarray(memoryview(out))  # no subclass
        plain[...] = values

    def only_plain(u, out):
        if type(out) is not np.ndarray:
            raise TypeError("Cannot determine Numba type of Recorder")
        out[...] = 0.75 * u[1:-1]

    x = cut(np.arange(48).reshape(6, 8), (3, 4))
    for function in (into_memory, only_plain):
        with pytest.raises(BlockMismatchError, match=r"of int64, got .* elements with fractions"):
            computed(iterate(function, x, {0: 1}, 3, ranks=1))


def test_imaginary_parts_in_real_fields_are_refused():
    def turned(u, out):
        out[...] = 1j * u

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BlockMismatchError, match=r"to float64 without loss, got complex128"):
            computed(iterate(turned, cut(FLOATS), 0, 3, ranks=1))
    y = iterate(turned, cut(FLOATS), 0, 2, ranks=1, dtype=complex)
    assert np.array_equal(computed(y), -FLOATS)


def test_integers_that_keep_their_values_are_taken():
    def rule(u, out):
        out[...] = np.where(u[2:] > u[:-2], 1, 0)  # of int64

    def wide(u, out):
        out[...] = u[1:-1].astype("f8").round().astype(out.dtype)

    def with_numbers(u, out):
        out[...] = 0
        out[u[1:-1] > 0] = True
        out[0] = 1.0

    x = BITS[:6, :8]
    for function in (rule, wide, with_numbers):
        for dtype in ("u1", "i8", "u4"):
            y = iterate(function, cut(x.astype(dtype), (3, 4)), {0: 1}, 3, ranks=1)
            (expected,) = reference(function, [x.astype(dtype)], 1, 3, ["periodic"])
            assert np.array_equal(computed(y), expected)


@pytest.mark.parametrize("dtype", ["u4", "i4", "f4", "f8", "i8", "u8", "c16", "M8[s]", "u1"])
def test_data_that_equal_the_marks_of_unfilled_memory(dtype):
    """A generator of random bits makes each pattern at some time."""

    def copied(u, out):
        out[...] = u

    def misses_an_edge(u, out):
        out[:, :-1] = u[:, :-1]

    for byte in (b"\xa5", b"\x5a"):
        x = np.frombuffer(byte * (64 * np.dtype(dtype).itemsize), dtype).reshape(8, 8)
        y = iterate(copied, cut(x, (4, 4)), 0, 3, ranks=1)
        assert np.array_equal(computed(y).view("u1"), x.view("u1"))
        if x.itemsize >= 4:
            with pytest.raises(BlockMismatchError, match="left 8 of 64 elements"):
                computed(iterate(misses_an_edge, cut(x, (4, 4)), 0, 3, ranks=1))


X = np.random.default_rng(0).normal(size=(24, 30))


def array(x=X, chunks=((5, 7, 4, 8), (14, 16))):
    return da.from_array(x, chunks=chunks)


def star(u, out):
    """A five-point stencil with another weight for each side."""
    out[:] = u[1:-1, 1:-1] + 0.1 * u[:-2, 1:-1] + 0.2 * u[2:, 1:-1]
    out[:] += 0.3 * u[1:-1, :-2] + 0.4 * u[1:-1, 2:]


def reference(function, fields, depth, steps, boundary, constants=(), **kwargs):
    """Compute the same by NumPy, with whole arrays."""
    for _ in range(steps):
        halo_array = [padded(field, depth, boundary) for field in fields]
        new = np.empty_like(fields[0])
        function(*halo_array, *constants, out=new, **kwargs)
        fields = [new, *fields[:-1]]
    return fields


@pytest.mark.parametrize("every", [1, 3])
def test_it_stops_when_the_function_asks_for_it(client, every):
    def halved(u, out):
        out[:] = u[1:-1, 1:-1] / 2
        return out.size, np.float64(out.sum())

    def small(count, total):
        assert count == X.size, "summed over all ranks"
        return total < count / 4

    y = iterate(halved, array(np.ones_like(X)), 1, 100, until=small, check_every=every, ranks=4)
    assert (y.compute() == 2.0**-3).all()


@pytest.mark.parametrize(("first", "second"), [("i8", "f8"), ("f8", "c16"), ("?", "i1")])
def test_fields_are_not_narrowed_to_the_first_one(first, second):
    fields = [array((X * 10).astype(dtype)) for dtype in (first, second)]
    with pytest.raises(InputError, match=f"fields that become .* dtype='{np.dtype(second)}'"):
        iterate(lambda u, v: u, fields, 1, 1, ranks=1)
    results = iterate(lambda u, v: u, fields, 1, 1, ranks=1, dtype=second)
    assert [array.dtype for array in results] == [second] * 2


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("more", [{}, {"until": lambda total: total < 0}, {"overlap": True}])
def test_without_steps_fields_come_back(client, ranks, more):
    def failing(u, v, out):
        raise AssertionError("no step was asked for")

    fields = array(X, (8, 3)), array(2 * X, (8, 3))
    kwargs = {"ranks": ranks, "checkpoint_every": np.int64(5), **more}
    u, v = iterate(failing, fields, 1, 0, dtype="f4", **kwargs)
    u, v = dask.compute(u, v)
    assert u.dtype == v.dtype == "f4"
    assert np.array_equal(u, X.astype("f4"))
    assert np.array_equal(v, (2 * X).astype("f4"))


def test_wrong_arguments_are_refused():
    def func(u):
        return u

    for arguments, options, match in (
        ((array(), func, 1, 2), {}, "expected a function of fields with a halo"),
        ((func, array(), -1, 2), {}, "expected a halo width"),
        ((func, array(), 25, 2), {}, "no wider than the array"),
        ((func, array(), {5: 1}, 2), {}, "depth: expected axes from 0 to 1, got the axis 5 in {5"),
        ((func, array(), 1, -1), {}, "number of steps, at least 0, got steps=-1. Give an integer"),
        ((func, (), 1, 1), {}, "at least one Dask array"),
        ((func, (array(), array()), [1], 1), {}, "expected a list with one depth for each of 2"),
        ((func, array(), 1, 2), {"exchange": "ring"}, "exchange: expected one of auto, diagonal"),
        ((func, array(), 1, 2), {"overlap": "yes"}, "expected True, False or 'auto', got 'yes'"),
        ((func, array(), 1, 2), {"boundary": ["none"]}, "expected one for all time levels"),
        ((func, array(), 1, 2), {"check_every": 0}, "steps, at least 1, got check_every=0"),
        ((func, array(), 1, 2), {"constants": [da.ones(3)]}, "Dask arrays of the fields' shape"),
    ):
        with pytest.raises(InputError, match=match):
            iterate(*arguments, **options)
    with pytest.raises(UnsupportedArrayError, match="expected a Dask array"):
        iterate(func, X, 1, 2)


RANKS = [1, 2, 3, 4]
NY, NX = 24, 20
P = RNG.normal(size=(NY, NX))
U, V = RNG.normal(size=(NY, NX + 1)), RNG.normal(size=(NY + 1, NX))
DT = 0.3


def accelerate(u, v, p, at):
    """Velocities on faces, from the pressures of the cells at both sides; walls stay at rest."""
    du, dv = np.diff(p[1:-1], axis=1), np.diff(p[:, 1:-1], axis=0)
    rows, columns = u.shape[0] - 2, v.shape[1] - 2
    u, v = u[1:-1, 1:-1], v[1:-1, 1:-1]
    return {"u": u - DT * du[:rows, : u.shape[1]], "v": v - DT * dv[: v.shape[0], :columns]}


def compress(p, u, v):
    """Pressures in cells, from the velocities on their faces."""
    rows, columns = p.shape[0] - 2, p.shape[1] - 2
    along_x = np.diff(u[1 : 1 + rows, 1 : 2 + columns], axis=1)
    along_y = np.diff(v[1 : 2 + rows, 1 : 1 + columns], axis=0)
    return {"p": p[1:-1, 1:-1] - DT * (along_x + along_y)}


STEP = [accelerate, compress]
BOUNDARY = {"p": "nearest", "*": 0.0}


def stepped(steps):
    p, u, v = P, U, V
    for _ in range(steps):
        wide = np.pad(p, 1, "edge")
        u = u - DT * np.diff(wide[1:-1], axis=1)
        v = v - DT * np.diff(wide[:, 1:-1], axis=0)
        p = p - DT * (np.diff(u, axis=1) + np.diff(v, axis=0))
    return p, u, v


def fields(chunks):
    p = da.from_array(P, chunks=chunks)
    u, v = da.from_array(U, chunks=(10, 6)), da.from_array(V, chunks=(25, 20))
    return {"p": p, "u": u, "v": v}


@pytest.mark.parametrize("chunks", [(6, 20), (24, 5), (8, 10), (5, 7), (24, 20)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", mostly_slow(RANKS, [1, 4]))
def test_pressures_in_cells_and_velocities_on_faces(client, chunks, ranks, overlap):
    options = {"boundary": BOUNDARY, "ranks": ranks, "overlap": overlap}
    lazy_result = iterate(STEP, fields(chunks), 1, 9, **options)
    assert lazy_result["u"].chunks[1][:-1] == lazy_result["p"].chunks[1][:-1]
    assert lazy_result["v"].chunks[0][-1] == lazy_result["p"].chunks[0][-1] + 1
    (result,) = dask.compute(lazy_result)
    for name, expected in zip("puv", stepped(9), strict=True):
        assert np.array_equal(result[name], expected), name


def test_other_shapes_are_refused():
    p, u = da.from_array(P, chunks=(6, 20)), da.from_array(U, chunks=(6, 21))
    for fields_of_shapes in ({"u": u, "p": p}, {"p": p[:, :-1], "u": u}, {"p": p, "u": u[:, 0]}):
        with pytest.raises(InputError, match=r"first one's"):
            iterate(lambda u, p: {"u": u}, fields_of_shapes, 0, 3)
