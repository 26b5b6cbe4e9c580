from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate
from dask_p2p.errors import InputError, UnsupportedArrayError
from tests.sections.iterate.test_coupled import padded

X = np.random.default_rng(0).normal(size=(24, 30))
CLUSTER = {"n_workers": 2, "threads_per_worker": 2}


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
