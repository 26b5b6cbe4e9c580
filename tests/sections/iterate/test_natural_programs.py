"""Programs as one first writes them: right by default, or refused in their first step."""

from __future__ import annotations

import warnings

import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate
from dask_p2p.errors import BlockMismatchError, InputError
from tests.sections.iterate.test_iterate import reference

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
RNG = np.random.default_rng(0)
FLOATS, BITS = RNG.normal(size=(24, 30)), RNG.integers(0, 2, (24, 30), dtype="u1")


def array(x, chunks=(6, 15)):
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
    y = iterate(star, array(x), 1, 3, corners=False, ranks=ranks)
    assert np.array_equal(y.compute(), reference(star, [x], 1, 3, "periodic")[0])
    for function in (corner, returned):
        y = iterate(function, array(x), 1, 3, corners=False, ranks=ranks)
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

    fields = (array(FLOATS), array(FLOATS))
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
            computed(iterate(function, array(FLOATS), 0, 2, ranks=1))
        y = iterate(function, array(FLOATS), 0, 2, ranks=1, until=lambda number: False)
        assert np.array_equal(computed(y), FLOATS)


def test_numbers_that_are_none():
    for number in ("text", None):
        y = iterate(lambda u, w=number: (u, w), array(FLOATS), 0, 2, ranks=1, until=lambda n: True)
        with pytest.raises(BlockMismatchError, match="expected numbers for until="):
            computed(y)
    y = iterate(lambda u: (u, np.ones(3)), array(FLOATS), 0, 2, ranks=1, until=lambda n: True)
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
        y = iterate(function, array(x, (3, 4)), {0: 1}, 3, ranks=1)
        with pytest.raises(BlockMismatchError, match=rf"converted to {x.dtype} without .*dtype="):
            computed(y)
        y = iterate(function, array(x, (3, 4)), {0: 1}, 3, ranks=1, dtype=float)
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

    x = array(np.arange(48).reshape(6, 8), (3, 4))
    for function in (into_memory, only_plain):
        with pytest.raises(BlockMismatchError, match=r"of int64, got .* elements with fractions"):
            computed(iterate(function, x, {0: 1}, 3, ranks=1))


def test_imaginary_parts_in_real_fields_are_refused():
    def turned(u, out):
        out[...] = 1j * u

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BlockMismatchError, match=r"to float64 without loss, got complex128"):
            computed(iterate(turned, array(FLOATS), 0, 3, ranks=1))
    y = iterate(turned, array(FLOATS), 0, 2, ranks=1, dtype=complex)
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
            y = iterate(function, array(x.astype(dtype), (3, 4)), {0: 1}, 3, ranks=1)
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
        y = iterate(copied, array(x, (4, 4)), 0, 3, ranks=1)
        assert np.array_equal(computed(y).view("u1"), x.view("u1"))
        if x.itemsize >= 4:
            with pytest.raises(BlockMismatchError, match="left 8 of 64 elements"):
                computed(iterate(misses_an_edge, array(x, (4, 4)), 0, 3, ranks=1))
