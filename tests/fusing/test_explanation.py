from __future__ import annotations

import dask
import dask.array as da
import dask.bag
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import InputError
from tests.fusing.support import stencils_of_dask_p2p
from tests.sections.emulated import on_gpu

CLUSTER = {"n_workers": 2}


def test_programs(client):
    x = da.from_array(np.ones((32, 32)), chunks=(4, 32))
    y = stencils_of_dask_p2p(x)
    assert dask_p2p.explain(y).startswith("by one gang: ")
    assert dask_p2p.explain(y, y.sum()).endswith("2 ranks, 6 exchanges")
    assert "4 tasks a rank more" in dask_p2p.explain(x + 1)
    assert "all tasks stay" in dask_p2p.explain(client.persist(x))
    with dask.annotate(priority=3):
        assert "no annotations of priority" in dask_p2p.explain(y)
    p2p = x.rechunk((32, 4), method="p2p")
    assert dask_p2p.explain(stencils_of_dask_p2p(p2p)).startswith("by one gang: ")


def test_xarray(client):
    xr = pytest.importorskip("xarray")
    y = stencils_of_dask_p2p(da.from_array(np.ones((32, 32)), chunks=(4, 32)))
    data = xr.Dataset({"a": (("x", "y"), y), "b": ("x", y[:, 0])})
    assert dask_p2p.explain(data).startswith("by one gang: ")


def test_other_collections(client):
    y = stencils_of_dask_p2p(da.from_array(np.ones((32, 32)), chunks=(4, 32)))
    lazy = dask.delayed(sum)([1, 2])
    assert "collections of them, got none" in dask_p2p.explain(lazy)
    assert "collections of them, got none" in dask_p2p.explain(dask.bag.from_sequence([1]))
    assert dask_p2p.explain(lazy, y) == dask_p2p.explain(y)
    assert dask_p2p.explain(y).startswith("by one gang: ")


def test_without_a_client():
    assert "synchronous client" in dask_p2p.explain(da.ones(3))


def test_blocks_of_gpus(gpu, client):
    y = stencils_of_dask_p2p(on_gpu(gpu, da.ones((32, 32), chunks=(4, 32))))
    assert dask_p2p.explain(y).startswith("by one gang: ")


def test_no_collection():
    with pytest.raises(InputError, match="at least one Dask collection"):
        dask_p2p.explain(np.ones(3))


def test_layers_that_cannot_be_read(client):
    x = da.from_array(np.ones((32, 32)), chunks=(4, 32))
    unknown = x[x[:, 0] > 0].rechunk({1: 8}, method="p2p")
    text = dask_p2p.explain(stencils_of_dask_p2p(x).sum() + unknown.sum())
    assert text.startswith("by Dask's tasks: expected known chunk sizes")
