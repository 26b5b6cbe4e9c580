from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from dask.array.utils import assert_eq, meta_from_array
from dask.utils import key_split

import dask_p2p
from dask_p2p.config import options
from dask_p2p.graph.arrays import planned_array
from dask_p2p.plans import redistribution


def test_any_plan_becomes_an_array():
    x = da.from_array(np.arange(12).reshape(4, 3), chunks=(2, 3))
    plan = redistribution(x.chunks, (0, 1), ((1, 3), (2, 1)))  # a rechunk: no axis moves
    y = planned_array("rechunked", x, plan, options())
    assert key_split(y.name) == "rechunked"
    assert y.chunks == ((1, 3), (2, 1))
    assert y.dtype == x.dtype
    assert isinstance(meta_from_array(y), np.ndarray)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), np.arange(12).reshape(4, 3))
    assert set(y.dask.dependencies[y.name]) == {x.name}


def test_an_output_block_depends_on_what_it_reads_only():
    x = da.ones((8, 8), chunks=(2, 8))
    y = planned_array("y", x, redistribution(x.chunks, (0, 1), ((4, 4), (8,))), options())
    layer = y.dask.layers[y.name]
    assert layer[y.name, 0, 0].dependencies == {(x.name, 0, 0), (x.name, 1, 0)}


@pytest.mark.parametrize("shape", [(6, 0), (0, 6), (0, 0), (0,), (3, 0, 2)])
@pytest.mark.parametrize("chunks", [2, -1])
def test_graphs_of_empty_arrays_are_valid(shape, chunks):
    x = np.zeros(shape)
    y = dask_p2p.transpose(da.from_array(x, chunks=chunks))
    y.dask.validate()
    assert_eq(y, x.T)
    assert_eq(dask_p2p.transpose(da.from_array(x, chunks=chunks), chunks=chunks), x.T)
