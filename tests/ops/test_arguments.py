"""Arguments of operations, and keywords that they pass to functions of users."""

import importlib
import inspect
from contextlib import suppress
from functools import partial

import dask
import dask.array as da
import dask.bag
import numpy as np
import pytest
import xarray as xr

import dask_p2p
import dask_p2p.xarray
from dask_p2p.backends.cupy import CUPY
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.ops import arguments
from dask_p2p.ops.arguments import check_array


@pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 2), (0, -3), (0, 1, 2), ("a", 0), 5, (0.5, 1)])
def test_wrong_axes(axes):
    with pytest.raises(InputError, match=r"expected a permutation of the 2 axes.*got axes="):
        dask_p2p.transpose(da.ones((2, 3)), axes)


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        (((1, 1), (9,)), "do not add up"),
        (((2, 2), (-1, 3)), "do not add up"),
        (((4, -1), (2,)), "must not be negative"),
        (((1.5, 1.5), (2,)), "differ from the shape"),
        ((3,), "same length"),
        ({5: 1}, "5 is not an axis"),
        ({"x": 3}, "'x' is not an axis: axes are numbered from 0 to 1"),
        ("enormous", "Could not interpret 'enormous'"),
        (0, "0 is not a valid size"),
        ((0, 3), "0 is not a valid size"),
        ({1: 0}, "0 is not a valid size"),
        ((-2, 3), "-2 is not a valid size: pass 1 or more, or -1 for all"),
        (2.5, "only contain integers"),
        (object(), "no len"),
        ({0: object()}, "unsupported operand"),
        (b"12", "byte"),
        ((float("nan"), 2), "unknown"),
        (10**30, ""),
        (print, ""),
    ],
)
def test_wrong_chunks(chunks, reason):
    with pytest.raises(InputError) as caught:
        dask_p2p.transpose(da.ones((2, 3)), chunks=chunks)
    words = "expected chunks for an array of shape (3, 2), as dask.array.rechunk takes them"
    for part in (words, f"got chunks={chunks!r}: ", reason):
        assert part in str(caught.value)


@pytest.mark.parametrize("chunks", [0, (0, 2), {0: 0}, -1])
def test_an_axis_without_elements_may_have_blocks_of_none(chunks):
    shape = (0, 0) if chunks == 0 else (3, 0)
    assert dask_p2p.transpose(da.ones(shape), chunks=chunks).shape == shape[::-1]


def test_unknown_chunks():
    x = da.ones((8, 3), chunks=(2, 3))
    with pytest.raises(InputError, match="compute_chunk_sizes"):
        dask_p2p.transpose(x[x[:, 0] > 0])


def stranger(module, *names):
    """An object of a class of another package, and of the classes that it inherits from."""
    kind = object
    for name in reversed(names):
        kind = type(
            name, (kind,), {"__module__": module, "__dask_graph__": dict, "chunks": ((1,),)}
        )
    return kind()


@pytest.mark.parametrize(
    ("x", "remedy"),
    [
        *((x, "from_array(x, chunks=...)") for x in (np.ones((2, 2)), [[1]], None)),
        ({"u": da.ones(3)}, "one of its arrays, x[name]"),
        ((da.ones(3),), "one of its arrays, x[0]"),
        (dask.delayed(np.ones)(3), "from_delayed(x, shape=..., dtype=...)"),
        (dask.delayed(np.ones(3)), "from_delayed(x, shape=..., dtype=...)"),
        (dask.bag.from_sequence([1, 2]), "from_delayed of each of x.to_delayed()"),
        (dask.bag.from_sequence([1, 2]).sum(), "from_delayed(x.to_delayed(), "),
        (stranger("xarray.core.dataarray", "DataArray"), "Pass x.data"),
        (stranger("xarray.core.dataset", "Dataset"), "x[name].data"),
        (stranger("pint", "Quantity"), "Pass x.magnitude"),
        (
            stranger("dask.dataframe.dask_expr._collection", "Series", "FrameBase"),
            "x.to_dask_array(lengths=True)",
        ),
    ],
)
@pytest.mark.parametrize("operation", [dask_p2p.transpose, dask_p2p.estimate])
def test_what_is_no_dask_array(x, remedy, operation):
    with pytest.raises(UnsupportedArrayError) as caught:
        operation(x)
    kind = type(x)
    assert f"expected a Dask array, got {kind.__module__}.{kind.__qualname__}." in str(caught.value)
    assert remedy in str(caught.value)


def test_objects_on_a_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(arguments, "backend_for", lambda meta: CUPY)
    x = da.from_array(np.array([None, 1], dtype=object), chunks=1)
    with pytest.raises(UnsupportedArrayError, match="expected a dtype that GPU memory can hold"):
        check_array(x)


class Sparse:
    """What Dask takes for an array."""

    dtype, ndim, shape = np.dtype("f8"), 1, (0,)

    def __array_function__(self, *args):
        return self

    def __getitem__(self, place):
        return self


def test_a_sparse_meta_is_refused():
    x = da.ones(2, chunks=2).map_blocks(lambda block: block, dtype="f8", meta=Sparse())
    with pytest.raises(UnsupportedArrayError, match="Sparse"):
        check_array(x)


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
