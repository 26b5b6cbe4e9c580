from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import InputError
from tests.support import mostly_slow

CLUSTER = {"n_workers": 2}


def by_dask(x, chunks):
    """Return the array in other chunks, by Dask's own peer-to-peer rechunk."""
    y = x.rechunk(chunks, method="p2p")
    assert type(y.__dask_graph__().layers[y.name]).__name__ == "P2PRechunkLayer"
    return y


@pytest.mark.parametrize("dtype", ["f8", "c8", "?", "M8[s]", "S3", ">i4"])
@pytest.mark.parametrize("chunks", mostly_slow([(12, 2), (5, 7), (6, -1)], [(5, 7)]))
def test_rechunks_are_done_by_ranks(client, dtype, chunks):
    values = np.arange(96).reshape(12, 8).astype(dtype)
    x = da.from_array(values, chunks=(3, 8)).map_blocks(np.copy, dtype=dtype)
    y = dask_p2p.fused(by_dask(x, chunks))
    computed = y.compute()
    assert computed.dtype == y.dtype == values.dtype
    np.testing.assert_array_equal(computed, values)


def masked(block):
    return np.ma.masked_less(block, 0.5)


def texts(block):
    return np.where(block > 0.5, block.astype(object), None)


STAYS = {
    "masked": lambda x: da.ma.filled(
        by_dask(x.map_blocks(masked, meta=np.ma.empty((0, 0))), {1: 5}), -1
    ),
    "objects": lambda x: by_dask(x.map_blocks(texts, dtype=object), {1: 5}).astype(float),
    "of unknown chunk sizes": lambda x: by_dask(x[x[:, 0] > 0.5], {1: 5}),
}


@pytest.mark.parametrize("name", mostly_slow(STAYS, ["masked"]))
def test_other_rechunks_stay_with_dask(client, name):
    values = np.random.default_rng(0).random((12, 8))
    y = STAYS[name](da.from_array(values, chunks=(2, 8))) + 1
    np.testing.assert_array_equal(dask_p2p.fused(y).compute(), y.compute())


def of_several_dtypes(block, block_id=None):
    return block.astype(("f8", "f4", "i2")[block_id[0] % 3])


@pytest.mark.parametrize("function", [masked, of_several_dtypes])
def test_blocks_unlike_their_declaration(client, function):
    """Dask computes them with `auto`; otherwise an error names the block."""
    values = np.random.default_rng(0).random((64, 8))
    x = da.from_array(values, chunks=(2, 8)).map_blocks(function, meta=np.empty((0, 0)))
    y = by_dask(by_dask(by_dask(x, (32, 2)) + 1, (16, 4)) + 1, (5, 7))
    expected = y.compute()
    with pytest.raises(InputError, match="block"):
        dask_p2p.fused(y).compute()
    with dask.config.set({"p2p.fuse": "auto"}):
        assert dask_p2p.explain(y).startswith("by one gang")
        computed = y.compute()
    assert computed.dtype == expected.dtype
    np.testing.assert_array_equal(computed, expected)


def test_a_rechunk_before_a_task_that_stays_with_dask(client):
    values = np.arange(64.0).reshape(8, 8)
    x = by_dask(da.from_array(values, chunks=(2, 8)) + 1, (8, 2))
    y = x.map_blocks(np.multiply, client.submit(float, 3), dtype=float)
    np.testing.assert_array_equal(dask_p2p.fused(y).compute(), (values + 1) * 3)
