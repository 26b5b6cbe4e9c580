"""Optimisers take slices, reductions and neighbours of exchanges before these are planned.

`tests.query_planning` runs the same chains with the expressions of `dask.array`.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import numpy as np
import pytest

import dask_p2p
from dask_p2p.engine.task import AssembleTask
from tests.support import indexed

VALUES = indexed((512, 64)).astype(float)
OTHER = VALUES.reshape(64, 512) / 8
WHOLE = VALUES.size


def without_large(block):
    return np.where(block > 99, np.nan, block)


def without_small(block):
    return np.where(block < 99, np.nan, block)


def transposed(x, function):
    return dask_p2p.transpose(x.map_blocks(function, dtype=float))


#: Arrays of `x` in 64 blocks, its values, and the elements that exchanges read.
CHAINS = {
    "transpose, add, slice, sum": (
        lambda da, x: (dask_p2p.transpose(x) + 1)[:10].sum(),
        lambda a: (a.T + 1)[:10].sum(),
        10 * 512,
    ),
    "two operations": (
        lambda da, x: (abs(dask_p2p.transpose(x)) * 2)[3, 5:9],
        lambda a: a.T[3, 5:9] * 2,
        4,
    ),
    "another operand of other chunks": (
        lambda da, x: (da.from_array(OTHER, chunks=(64, 64)) - dask_p2p.transpose(x))[:9:2],
        lambda a: (OTHER - a.T)[:9:2],
        5 * 512,
    ),
    "a row as operand": (
        lambda da, x: (dask_p2p.transpose(x) * da.from_array(VALUES[:, 0], chunks=64))[::-1][:2],
        lambda a: (a.T * a[:, 0])[::-1][:2],
        2 * 512,
    ),
    "a column as operand": (
        lambda da, x: (dask_p2p.transpose(x) / da.from_array(OTHER[:, :1] + 1, chunks=64))[:, 7],
        lambda a: (a.T / (OTHER[:, :1] + 1))[:, 7],
        64,
    ),
    "slices of two exchanges": (
        lambda da, x: (dask_p2p.transpose(x) + 1)[:3].sum() - dask_p2p.transpose(x)[5].sum(),
        lambda a: (a.T + 1)[:3].sum() - a.T[5].sum(),
        4 * 512,
    ),
    "back after an operation": (
        lambda da, x: dask_p2p.transpose(dask_p2p.transpose(x) * 2 + 1, chunks=x.chunks),
        lambda a: a * 2 + 1,
        0,
    ),
    "back after an operation of two": (
        lambda da, x: dask_p2p.transpose(
            dask_p2p.transpose(x) * dask_p2p.transpose(x + 1), chunks=x.chunks
        ),
        lambda a: a * (a + 1),
        0,
    ),
    "twice": (
        lambda da, x: dask_p2p.rechunk(dask_p2p.rechunk(x, (100, 7)), (-1, 1)),
        lambda a: a,
        WHOLE,
    ),
    "there and back": (
        lambda da, x: dask_p2p.transpose(dask_p2p.transpose(x), chunks=x.chunks),
        lambda a: a,
        0,
    ),
    "largest": (
        lambda da, x: dask_p2p.transpose(x).max(),
        lambda a: a.max(),
        0,
    ),
    "smallest of columns": (
        lambda da, x: dask_p2p.transpose(x).min(axis=1),
        lambda a: a.min(axis=0),
        64,
    ),
    "largest, without NaN": (
        lambda da, x: da.nanmax(transposed(x, without_large), axis=1),
        lambda a: np.nanmax(np.where(a > 99, np.nan, a), axis=0),
        64,
    ),
    "smallest, without NaN": (
        lambda da, x: da.nanmin(transposed(x, without_small)),
        lambda a: a[a >= 99].min(),
        0,
    ),
    "integers of rows, without NaN": (
        lambda da, x: da.nansum(dask_p2p.transpose(x.astype(int)), axis=0),
        lambda a: a.T.astype(int).sum(axis=0),
        512,
    ),
    "a sum of fractions without NaN keeps its order": (
        lambda da, x: da.nansum(transposed(x, without_large), axis=1),
        lambda a: np.nansum(np.where(a > 99, np.nan, a).T, axis=1),
        WHOLE,
    ),
    "integers of rows": (
        lambda da, x: dask_p2p.transpose(x.astype(int)).sum(axis=0, keepdims=True, split_every=4),
        lambda a: a.T.astype(int).sum(axis=0, keepdims=True),
        512,
    ),
    "large elements of rows": (
        lambda da, x: (dask_p2p.transpose(x) > 99).sum(axis=0),
        lambda a: (a.T > 99).sum(axis=0),
        512,
    ),
    "elements as large as the largest": (
        lambda da, x: (dask_p2p.transpose(x) >= dask_p2p.transpose(x).max()).sum(),
        lambda a: 1,
        0,
    ),
    "divided by its largest": (
        lambda da, x: dask_p2p.transpose(
            dask_p2p.transpose(x) / dask_p2p.transpose(x).max(), chunks=x.chunks
        ),
        lambda a: a / a.max(),
        0,
    ),
    "a sum of fractions keeps its order": (
        lambda da, x: dask_p2p.transpose(x / 3).sum(axis=1),
        lambda a: (a.T / 3).sum(axis=1),
        WHOLE,
    ),
    "an array that others need": (
        lambda da, x: dask_p2p.transpose(x)[:3].sum() + dask_p2p.transpose(x).mean(),
        lambda a: a.T[:3].sum() + a.mean(),
        WHOLE,
    ),
}


def tasks_of(y):
    """This package's tasks, and the number of all tasks."""
    graph = dict(y.optimize().__dask_graph__())
    return [task for task in graph.values() if isinstance(task, AssembleTask)], len(graph)


def check_chain(da, name):
    make, of_values, elements = CHAINS[name]
    y = make(da, da.from_array(VALUES, chunks=(8, 64)))
    wanted = np.asarray(of_values(VALUES))
    assert y.shape == wanted.shape, name
    found = y.compute(scheduler="sync")
    assert found.dtype == y.dtype, name
    np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=name)
    np.testing.assert_array_equal(y.persist(scheduler="sync").compute(), found, name)
    tasks, _ = tasks_of(y)
    read = sum(sum(task.plan.source_elements(task.index)) for task in tasks)
    assert read == elements, name


def check_small_results(da):
    """A result of fewer bytes is exchanged in place of its operand."""
    x = da.from_array(VALUES, chunks=(8, 64))
    small, large = dask_p2p.transpose(x) > 99, dask_p2p.transpose(x) * 1j
    for y, dtype in ((small, "?"), (small[:3], "?"), (large, "f8")):
        assert {task.output.dtype for task in tasks_of(y)[0]} == {np.dtype(dtype)}
    both = small.sum() + dask_p2p.transpose(x).sum()
    assert {task.output.dtype for task in tasks_of(both)[0]} == {np.dtype("f8")}, "made anyway"
    assert both.compute(scheduler="sync") == (VALUES > 99).sum() + VALUES.sum()


def check_reductions(da):
    """Values, dtypes, and functions of users that look like the steps of reductions."""
    numbers = VALUES[:, :8] % 3
    for values in (numbers, numbers.astype("i2"), numbers > 1):
        y = dask_p2p.transpose(da.from_array(values, chunks=(8, 4)))
        for name in ("sum", "prod", "max", "min", "any", "all", "mean"):
            for given in ({}, {"axis": 0}, {"axis": 1, "keepdims": True}, {"split_every": 2}):
                result = getattr(y, name)(**given)
                given.pop("split_every", None)
                wanted = np.asarray(getattr(values.T, name)(**given))
                found = result.compute(scheduler="sync")
                assert found.dtype == wanted.dtype, (name, given)
                np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=f"{name} {given}")
    check_reductions_without_nan(da, numbers)
    integers = numbers.astype(int)
    y = dask_p2p.transpose(da.from_array(integers, chunks=(8, 4)), chunks=(4, 64))
    of_blocks = integers.T.reshape(8, 8, 64).sum(axis=2)
    sums = y.map_blocks(np.sum, axis=(1,), keepdims=True, dtype=int, chunks=(4, (1,) * 8))
    np.testing.assert_array_equal(sums.compute(scheduler="sync"), of_blocks)
    largest = da.reduction(y, np.sum, np.max, axis=(1,), dtype=int)
    np.testing.assert_array_equal(largest.compute(scheduler="sync"), of_blocks.max(axis=1))


def check_reductions_without_nan(da, numbers):
    holes = np.where(numbers > 1, np.nan, numbers)
    holes[:8], holes[:, 2] = np.nan, np.nan
    for values in (numbers, numbers.astype("i2"), numbers > 1, holes):
        y = dask_p2p.transpose(da.from_array(values, chunks=(8, 4)))
        for name in ("nansum", "nanprod", "nanmax", "nanmin", "nanmean"):
            for given in ({}, {"axis": 0}, {"axis": 1, "keepdims": True}):
                with warnings.catch_warnings():  # of slices without numbers
                    warnings.simplefilter("ignore", RuntimeWarning)
                    wanted = np.asarray(getattr(np, name)(values.T, **given))
                    found = getattr(da, name)(y, **given).compute(scheduler="sync")
                assert found.dtype == wanted.dtype, (name, given)
                np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=f"{name} {given}")


def check_reductions_after_the_exchange(da):
    """Objects may be equal and differ, and blocks without elements have no largest one."""
    objects = da.from_array(np.array([[1, True], [1.0, 0]], dtype=object), chunks=(1, 2))
    empty = da.from_array(VALUES, chunks=((256, 0, 256), (64,)))
    for x, axis in ((objects, 1), (empty, None)):
        y = dask_p2p.transpose(x).max(axis=axis)
        assert tasks_of(y)[0]
        wanted = x.compute(scheduler="sync").T.max(axis=axis)
        np.testing.assert_array_equal(y.compute(scheduler="sync"), wanted)


def check_tasks_and_regions(da, most):
    """The chain of 64 blocks reads the regions of its slice."""
    x = da.from_array(VALUES, chunks=(8, 64))
    y = (dask_p2p.transpose(x) + 1)[:10].sum()
    tasks, count = tasks_of(y)
    assert len(tasks) == 10
    assert sum(len(task.plan.sources(task.index)) for task in tasks) == 10 * 64
    whole, count_whole = tasks_of((dask_p2p.transpose(x) + 1).sum())
    assert len(whole) == 64
    assert count <= most < count_whole


needs_dask_array = pytest.mark.skipif(
    find_spec("dask_array") is None, reason="needs it: pip install dask-array"
)


@needs_dask_array
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name, dask_array):
    check_chain(dask_array, name)


@needs_dask_array
def test_results_of_fewer_bytes(dask_array):
    check_small_results(dask_array)


@needs_dask_array
def test_reductions(dask_array):
    check_reductions(dask_array)


@needs_dask_array
def test_tasks_and_regions_of_a_slice(dask_array):
    check_tasks_and_regions(dask_array, most=90)


@needs_dask_array
def test_deep_sums_take_little_time(dask_array):
    """Each operation has its operand twice: paths to the exchange double at each."""
    x = dask_array.from_array(VALUES, chunks=(256, 64))
    y = dask_p2p.transpose(x)
    for _ in range(40):
        y = y + y
    y = dask_p2p.transpose(y, chunks=x.chunks)
    assert not tasks_of(y)[0]
    np.testing.assert_array_equal(y.compute(scheduler="sync"), VALUES * 2.0**40)


@needs_dask_array
def test_reductions_after_the_exchange(dask_array):
    check_reductions_after_the_exchange(dask_array)


def test_parts_of_the_expressions_of_dask():
    """Private parts of `dask.array`, as this package knows them."""
    from dask_p2p.graph import expression as own

    assert own.SliceSlicesIntegers._parameters == ["array", "index", "allow_getitem_optimization"]
    assert own.Elemwise._parameters == ["op", "dtype", "name", "where"]
    assert own.Transpose._parameters == ["array", "axes"]
    assert {"array", "_chunks", "method"} <= {*own.Rechunk._parameters}
    assert issubclass(own.TasksRechunk, own.Rechunk)
    assert {"func", "dtype", "kwargs"} <= {*own.Blockwise._parameters}
    assert {"array", "func", "dtype"} <= {*own.PartialReduce._parameters}
    for name in ("elemwise_args", "args", "where"):
        assert hasattr(own.Elemwise, name) or name in own.Elemwise._parameters
    for name in ("_simplify_down", "_simplify_up", "_lower", "rechunk"):
        assert hasattr(own.ArrayExpr, name), name
