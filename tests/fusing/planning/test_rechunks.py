from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.fusing.planning.tasks import keys_of
from tests.support import BOUND_S, mostly_slow

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


def texts(block):
    return np.where(block > 0.5, block.astype(object), None)


def masked(block):
    return np.ma.masked_less(block, 0.5)


def masked_in_part(block, block_id=None):
    return masked(block) if block_id[0] % 2 else block


def of_several_dtypes(block, block_id=None):
    return block.astype(("f8", "f4", "i2")[block_id[0] % 3])


@pytest.mark.parametrize("function", [texts, masked, masked_in_part, of_several_dtypes])
@pytest.mark.parametrize("chunks", mostly_slow([(12, 2), (5, 7), (6, -1)], [(5, 7)]))
def test_blocks_of_any_class_and_dtype(client, function, chunks):
    """The graph of Dask's rechunk does not declare them."""
    values = np.random.default_rng(0).random((12, 8))
    x = da.from_array(values, chunks=(2, 8)).map_blocks(function, meta=np.empty((0, 0)))
    y = by_dask(x, chunks)
    for number, key in enumerate(keys_of(y)):
        blocks = [
            client.compute(each.blocks[np.unravel_index(number, y.numblocks)]).result(BOUND_S)
            for each in (y, dask_p2p.fused(y))
        ]
        assert type(blocks[0]) is type(blocks[1]), key
        assert blocks[0].dtype == blocks[1].dtype
        assert blocks[0].tolist() == blocks[1].tolist()


def test_unknown_and_empty_chunks():
    x = da.ones((8, 8), chunks=(2, 8))
    unknown = by_dask(x[x[:, 0] > 0], {1: 2})
    with pytest.raises(UnsupportedArrayError, match="compute_chunk_sizes"):
        dask_p2p.fused(unknown)
    with pytest.raises(UnsupportedArrayError, match="at least 1"):
        dask_p2p.fused(by_dask(x, ((8,), (0, 8))))


def test_a_rechunk_before_a_task_that_stays_with_dask(client):
    x = by_dask(da.ones((8, 8), chunks=(2, 8)), (8, 2))
    y = x.map_blocks(np.multiply, client.submit(float, 3), dtype=float)
    with pytest.raises(UnsupportedArrayError, match="before a task that stays with Dask"):
        dask_p2p.fused(y)
    assert dask.is_dask_collection(y)
