"""Errors in arguments are raised when the array is made, not when it is computed."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate, spmd
from dask_p2p.errors import InputError, UnsupportedArrayError

X = np.arange(24.0).reshape(6, 4)


def array(x=X):
    return da.from_array(x, chunks=(3, 2))


def same(u):
    return u


@pytest.mark.parametrize("constants", [2.0, np.ones(4), "c", da.ones(6, chunks=3), {"c": 1}])
def test_constants_are_several(constants):
    with pytest.raises(InputError, match=r"constants: expected a tuple .* as \(constant,\)"):
        iterate(same, array(), 0, 1, constants=constants)


@pytest.mark.parametrize(
    "keywords",
    [
        {"constants": (dask.delayed(2.0),)},
        {"constants": ([array()],)},
        {"c": array().max()},
        {"c": {"of": [array()]}},
    ],
    ids=["delayed", "in a list", "an array", "in a dict"],
)
def test_what_is_still_to_be_computed(keywords):
    match = "expected computed constants and keywords, got (Delayed|dask.array)"
    with pytest.raises(InputError, match=match):
        iterate(same, array(), 0, 1, **keywords)
    if "c" in keywords:
        with pytest.raises(InputError, match=match):
            spmd(lambda ctx, x, c: x, array(), **keywords)


def test_futures_are_not_there_yet(client):
    future = client.scatter(np.ones(4))
    with pytest.raises(InputError, match="expected computed constants and keywords, got <Future"):
        iterate(same, array(), 0, 1, constants=(future,))


@pytest.mark.parametrize("dtype", [object, [("a", "f8"), ("b", "O")]])
def test_python_objects_are_no_fields(dtype):
    x = da.from_array(np.empty((6, 4), dtype), chunks=(3, 2))
    with pytest.raises(UnsupportedArrayError, match="expected fields without Python objects"):
        iterate(same, x, 0, 1)

    def halo_array(ctx, a):
        return ctx.with_halo(a).inner

    with pytest.raises(InputError, match="expected one without Python objects"):
        spmd(halo_array, x, ranks=1).compute(scheduler="sync")


@pytest.mark.parametrize(
    ("dtype", "boundary"),
    [("i8", np.nan), ("i8", 0.5), ("i1", 1000), ("u2", -1), ("f8", 1j), ("?", 2)],
)
def test_boundaries_that_the_fields_cannot_hold(dtype, boundary):
    x = array(X.astype(dtype))
    for beyond in (boundary, {0: "reflect", 1: boundary}):
        with pytest.raises(InputError, match=r"expected a boundary that \w+ can hold, got"):
            iterate(same, x, 1, 1, boundary=beyond)
    iterate(same, x, 1, 1, boundary=1.0 if dtype != "f8" else np.inf)


@pytest.mark.parametrize("partition", [0, (0.0,), (2,), ("x",)])
def test_partitions_are_axes(partition):
    with pytest.raises(
        InputError, match="partition: expected a tuple of axes of an array of 2 dim"
    ):
        spmd(lambda ctx, x: x, array(), partition=partition)
    assert spmd(lambda ctx, x: x, array(), partition=(np.int64(-1),)).shape == (6, 4)
