"""Functions of users that break their contract, and memory that ranks protect from them."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate, spmd
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from tests.sections.api.test_arguments import array


def computed(y):
    return y.compute(scheduler="sync")


def later(u):
    return u + (np.timedelta64(1, "s") if u.dtype.kind == "M" else 1)


def forgets(u, out):
    return later(u)


@pytest.mark.parametrize("dtype", ["u1", "?", "f2", "U3", [("a", "f8")]])
def test_few_small_elements_and_other_kinds_are_not_looked_at(dtype):
    def copied(u, out):
        out[:] = u

    x = np.zeros((6, 4), dtype)
    assert np.array_equal(computed(iterate(copied, array(x), 0, 2, ranks=1)), x)


@pytest.mark.parametrize("dtype", ["u1", "?", "f2", "i2"])
def test_small_elements_that_are_not_filled_are_named(dtype):
    """Cells of an automaton would be zeros, without a word."""
    x = np.zeros((20, 20), dtype)
    with pytest.raises(BlockMismatchError, match="but it left 400 of 400 elements as they"):
        computed(iterate(forgets, da.from_array(x, chunks=5), 0, 3, ranks=1))


def test_none_does_not_stop_it():
    """Conditions often are ``if small: return True``, without another return."""

    def until(last):
        return True if last["sum"] > 4 * 12 else None

    options = {"record": {"sum": lambda u: u.sum()}, "until": until, "ranks": 1}
    lazy_result = iterate(lambda u: {"u": u + 1}, {"u": array(np.zeros((3, 4)))}, 0, 9, **options)
    assert computed(lazy_result["steps"]) == 5


def test_fields_and_constants_are_only_read():
    """The next step, the other part of an overlapped one, or another run would read the change."""

    def field(u, weight, bias, out):
        out[:] = u
        u *= 0.5

    def array_constant(u, weight, bias, out):
        weight += 1
        out[:] = u

    def divided_constant(u, weight, bias, out):
        bias[0] = 1
        out[:] = u

    def returning(u, weight, bias):
        u[0] = 0
        return u

    def older(u, before, out):
        before[...] = 0
        out[:] = u

    weight, bias = np.zeros(1), array() * 0
    for function in (field, array_constant, divided_constant, returning):
        for overlap in (False, True):
            y = iterate(function, array(), 0, 3, constants=(weight, bias), ranks=1, overlap=overlap)
            with pytest.raises(InputError, match=r"only reads its fields and.*u = u\.copy\(\)"):
                computed(y)
    assert weight == 0
    with pytest.raises(InputError, match="only reads its fields"):
        computed(iterate(older, (array(), array()), 0, 3, ranks=1)[0])


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (lambda x: np.ma.masked_less(x, 3), UnsupportedArrayError, None),
        (lambda x: x[:1, :1], BlockMismatchError, None),
        (lambda x: x.astype("f4"), BlockMismatchError, None),
        (lambda x: 3.0, UnsupportedArrayError, r"got builtins\.float"),
        (lambda x: None, UnsupportedArrayError, r"got builtins\.NoneType"),
        (lambda x: x.tolist(), UnsupportedArrayError, r"got builtins\.list"),
    ],
    ids=["masked", "of one element", "of another dtype", "a number", "None", "a list"],
)
def test_blocks_that_differ_from_their_array_metadata(block, error, message):
    """A mask would be lost, one element be repeated."""
    x = array().map_blocks(block, dtype=float, meta=np.empty((0, 0)))
    for y in (
        iterate(lambda u: u, x, 0, 1, ranks=1),
        iterate(lambda u, c: u, array(), 0, 1, constants=(x,), ranks=1),
        spmd(lambda ctx, u: u, x, ranks=1),
    ):
        with pytest.raises(error, match=message):
            computed(y)
