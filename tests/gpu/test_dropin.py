"""Code for CuPy blocks that rechunks by Dask's own methods, as it is."""

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from tests.gpu.support import on_gpu, on_host
from tests.support import persisted, result_of

pytestmark = pytest.mark.gpu(2)

X = np.random.default_rng(0).random((128, 96))


@pytest.mark.parametrize("count", [1, 2])
def test_small_and_empty_blocks(client, count):
    def slope(*blocks):
        assert all(block.size for block in blocks)
        return (sum(blocks)[1:] - sum(blocks)[:-1]).sum() * 0 + blocks[0]

    x = persisted(client, on_gpu(X, (16, -1)))
    for chunks in (((0, 100, 1, 27), (96,)), ((128,), (0, 90, 6)), ((0, 128), (96, 0))):
        small = dask_p2p.rechunk(x, chunks)
        stock = da.from_array(X, chunks=chunks).map_overlap(np.copy, {0: 2}, dtype=X.dtype)
        with dask_p2p.install() as used:
            y = da.map_overlap(slope, *[small] * count, depth={0: 2}, dtype=X.dtype)
        assert used.count == 1
        assert y.chunks == stock.chunks
        np.testing.assert_array_equal(on_host(y), X)
        result = dask_p2p.map_overlap(slope, *[small] * count, depth={0: 2}, dtype=X.dtype)
        assert result.chunks == chunks
        np.testing.assert_array_equal(on_host(result), X)


def test_unknown_sizes(client):
    x = persisted(client, on_gpu(X, (16, -1)))
    rows = x[x[:, 0] > 0.5]
    with dask_p2p.install():
        y = rows.rechunk({1: 12}, method="p2p")
    np.testing.assert_array_equal(on_host(y), X[X[:, 0] > 0.5])


def test_what_the_same_code_does_without(client):
    """Once Dask's own way takes CuPy blocks, all this is of less use."""
    x = persisted(client, on_gpu(X, (16, -1)))
    y = x.rechunk({0: -1, 1: 12}).map_blocks(lambda block: block.get(), meta=np.empty((0, 0)))
    with dask.config.set({"distributed.p2p.storage.disk": False}):
        future = client.compute(y)
    with pytest.raises(Exception, match=r"(?i)p2p|shuffl|cupy|buffer"):
        result_of(client, future)
