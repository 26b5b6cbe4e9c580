"""Keywords of operations, and those that they pass to functions of users."""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from functools import partial

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import dask_p2p
import dask_p2p.xarray
from dask_p2p.errors import InputError

X = np.arange(24.0).reshape(6, 4)
OPERATIONS = (
    *(dask_p2p.map_overlap, dask_p2p.map_on_gpu, dask_p2p.iterate, dask_p2p.spmd),
    *(dask_p2p.xarray.P2PAccessor.iterate, da.map_blocks),
)
ON_THE_WAY = [
    *(f"dask_p2p.ops.{name}" for name in ("overlap", "arguments", "rechunk")),
    *(f"dask_p2p.on_gpu.{name}" for name in ("map_on_gpu", "block")),
    *(f"dask_p2p.sections.iterate.{name}" for name in ("iterate", "iteration", "capture")),
    *(f"dask_p2p.sections.api.{name}" for name in ("spmd", "graph")),
    *("dask_p2p.sections.context.context", "dask_p2p.sections.gang.rank"),
    *("dask_p2p.sections.exchange.halo", "dask_p2p.xarray", "dask_p2p.xarray.by_name"),
    *("dask.array.core", "dask.array.blockwise", "dask.blockwise", "functools"),
]


def array():
    return da.from_array(X, chunks=(3, 2))


def labelled():
    return xr.DataArray(array(), dims=("x", "y"), name="u")


def computed(y):
    return np.asarray(y.compute(scheduler="sync"))


def added(*blocks, **keywords):
    """A function of blocks that takes any keyword, and returns other values for each value."""
    return sum(blocks) + sum(keywords.values())


def added_in_context(ctx, x, /, **keywords):
    return added(x, **keywords)


CALLS = {
    "map_overlap": partial(dask_p2p.map_overlap, depth=1, dtype=float),
    "map_overlap by Dask": partial(dask_p2p.map_overlap, depth=1, dtype=float, token="added"),
    "map_overlap of several arrays": lambda func, x, /, **options: dask_p2p.map_overlap(
        func, x, 0 * x, depth={0: 1}, dtype=float, **options
    ),
    "map_on_gpu": partial(dask_p2p.map_on_gpu, dtype=float, fallback="numpy"),
    "iterate": lambda func, x, /, **options: dask_p2p.iterate(func, x, 0, 1, **options),
    "spmd": lambda _, x, /, **options: dask_p2p.spmd(added_in_context, x, **options),
    "map_overlap of xarray": lambda func, _, /, **options: labelled().p2p.map_overlap(
        func, {"x": 1}, **options
    ),
    "iterate of xarray": lambda func, _, /, **options: labelled().p2p.iterate(
        func, {}, 1, **options
    ),
}


def parameter_names():
    """All names of parameters of the functions and classes that a keyword passes."""
    parameters = set()
    for module in map(importlib.import_module, ON_THE_WAY):
        values = [value for value in vars(module).values() if inspect.isroutine(value)]
        for cls in filter(inspect.isclass, vars(module).values()):
            values += [cls, *filter(inspect.isfunction, vars(cls).values())]
        for value in values:
            with suppress(TypeError, ValueError):
                parameters.update(inspect.signature(value).parameters)
    return parameters


def keyword_names(operation):
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(operation).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind in kinds}


PLAIN = {"func", "x", "self", "plan", "function", "local_block", "arrays", "kwargs", "keywords"}


@pytest.mark.parametrize("name", CALLS)
def test_all_other_keywords_are_for_the_function(name):
    names = parameter_names() - set().union(*map(keyword_names, OPERATIONS)) | PLAIN
    assert len(names) > 200
    result = CALLS[name](added, array(), **dict.fromkeys(names, 3))
    np.testing.assert_array_equal(computed(result), X + 3 * len(names))


# --- keywords that an operation and the function both take


def shifted(u, ranks=0, axis=0, corners=0, fields=0):
    return u + ranks + axis + corners + fields


def shifted_in_context(ctx, u, ranks=0):
    return u + ranks


@pytest.mark.parametrize(
    ("function", "name", "call"),
    [
        (shifted, "corners", lambda f: dask_p2p.map_overlap(f, array(), 1, corners=False)),
        (shifted, "axis", lambda f: dask_p2p.map_on_gpu(f, array(), axis=0, fallback="numpy")),
        (shifted, "ranks", lambda f: dask_p2p.iterate(f, array(), 0, 1, ranks=1)),
        (shifted_in_context, "ranks", lambda f: dask_p2p.spmd(f, array(), ranks=1)),
        (shifted, "corners", lambda f: labelled().p2p.map_overlap(f, 1, corners=False)),
        (shifted, "fields", lambda f: labelled().to_dataset().p2p.iterate(f, 0, 1, fields="u").u),
    ],
)
def test_a_keyword_of_two_is_refused(function, name, call):
    with pytest.raises(InputError, match=rf"{name}=.*both take.*partial\(func, {name}=\.\.\.\)"):
        call(function)
    np.testing.assert_array_equal(computed(call(partial(function, **{name: 3}))), X + 3)


def test_names_of_positional_parameters_are_clear():
    """The section's only array is the function's argument `ranks`."""
    y = dask_p2p.spmd(lambda ctx, ranks: ranks + 1, array().rechunk(-1), ranks=2)
    np.testing.assert_array_equal(computed(y), X + 1)
