"""Errors in arguments are raised when the array is made, not when it is computed."""

from __future__ import annotations

import inspect
from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate, spmd
from dask_p2p.errors import InputError, UnsupportedArrayError
from tests.support import added, parameter_names

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


ON_THE_WAY = [
    *(f"dask_p2p.sections.iterate.{name}" for name in ("iterate", "iteration", "capture")),
    *(f"dask_p2p.sections.api.{name}" for name in ("spmd", "graph")),
    "dask_p2p.sections.context.context",
    *("dask_p2p.sections.gang.rank", "dask_p2p.sections.exchange.halo"),
    *("dask_p2p.ops.arguments", "functools", "dask.array.core"),
]


def added_in_context(ctx, x, /, **keywords):
    return added(x, **keywords)


@pytest.mark.parametrize("operation", ["iterate", "spmd"])
def test_all_other_keywords_are_for_the_function(operation):
    make = {
        "iterate": lambda **keywords: iterate(added, array(), 0, 1, **keywords),
        "spmd": lambda **keywords: spmd(added_in_context, array(), **keywords),
    }[operation]
    parameters = inspect.signature({"iterate": iterate, "spmd": spmd}[operation]).parameters
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    keywords = {name for name, parameter in parameters.items() if parameter.kind in named}
    names = {*parameter_names(*ON_THE_WAY)} - keywords
    assert {"func", "x", "self", "function", "local_block", "arrays", "kwargs"} <= names
    y = make(**dict.fromkeys(names, 3))
    np.testing.assert_array_equal(y.compute(scheduler="sync"), X + 3 * len(names))


def of_many(u, ranks=1, dtype=None):
    return u + ranks


@pytest.mark.parametrize(
    "make",
    [
        lambda func: iterate(func, array(), 0, 1, ranks=2),
        lambda func: spmd(lambda ctx, u, ranks=1: func(u, ranks), array(), ranks=2),
    ],
    ids=["iterate", "spmd"],
)
def test_a_keyword_of_two_is_refused(make):
    with pytest.raises(InputError, match=r"ranks=2.*both take.*partial\(func, ranks=\.\.\.\)"):
        make(of_many)


def test_keywords_that_are_clear():
    bound = partial(of_many, ranks=3)
    y = iterate(bound, array(), 0, 1, ranks=1, dtype="f4")
    np.testing.assert_array_equal(y.compute(scheduler="sync"), X + 3)
    one_block = array().rechunk(-1)
    # The function's parameter has the name of a keyword.
    y = spmd(lambda ctx, ranks: ranks + 1, one_block, ranks=2)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), X + 1)


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
