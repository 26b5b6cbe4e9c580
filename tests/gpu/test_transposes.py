"""Transposes of CuPy blocks on a dask-cuda cluster: right, whatever is transposed."""

from __future__ import annotations

import dask
import numpy as np
import pytest

import dask_p2p
from dask_p2p.cli.cluster import indexed_array
from dask_p2p.errors import BlockMismatchError
from tests.gpu.support import assert_right, check_transpose, gpu_client, on_gpu, on_host
from tests.support import persisted, used

pytestmark = pytest.mark.gpu(2)


CASES = [
    ((400, 300), (100, 300), None, None),
    ((401, 299), (101, 299), None, None),
    ((400, 300), (70, 80), None, None),
    ((400, 300), (200, 300), None, (400, 7)),
    ((12, 10, 80), (3, 10, 80), (2, 0, 1), None),
    ((12, 10, 80), (3, 5, 80), (0, 2, 1), (5, 50, 5)),
    ((3, 4, 5, 6), (1, 2, 5, 3), (2, 0, 3, 1), None),
    ((3, 7), (1, 7), None, None),
    ((400,), (90,), None, None),
    ((0, 5), (1, 5), None, None),
]


@pytest.mark.parametrize(("shape", "chunks", "axes", "to"), CASES)
@pytest.mark.parametrize("order", [["ipc"], ["ucx"], ["pinned"], ["comm"]], ids=str)
def test_equals_numpy(client, shape, chunks, axes, to, order):
    x = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape)
    a = persisted(client, on_gpu(x, chunks))
    with dask.config.set({"p2p.transports.order": order}):
        y = persisted(client, dask_p2p.transpose(a, axes, chunks=to))
    np.testing.assert_array_equal(on_host(y), np.transpose(x, axes))
    assert used(client, y) <= set(order)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "float16", "float32", "int64", "complex64", "complex128"]
)
@pytest.mark.parametrize("transport", ["ipc", "ucx", "pinned"])
def test_every_item_size(client, dtype, transport):
    shape = (1030, 770)
    a = persisted(client, indexed_array(shape, (300, 770), dtype, kind="cupy"))
    with dask.config.set({"p2p.transports.order": [transport]}):
        y = persisted(client, dask_p2p.transpose(a))
    assert y.dtype == dtype
    assert_right(client, y, shape)
    assert used(client, y) == {transport}


@pytest.mark.parametrize("protocol", ["tcp", "ucx"])
def test_ucx_in_small_messages_whatever_dasks_protocol(protocol):
    shape = (6000, 5000)
    with (
        dask.config.set({"p2p.transports.order": ["ucx"], "p2p.transports.part-bytes": "1 MiB"}),
        gpu_client(protocol=protocol) as client,
    ):
        a = persisted(client, indexed_array(shape, (700, 5000), "f4", kind="cupy"))
        for _ in range(5):
            check_transpose(client, a, "ucx")


def test_comm_over_ucx():
    shape = (3000, 2000)
    with gpu_client(protocol="ucx") as client, dask.config.set({"p2p.transports.order": ["comm"]}):
        a = persisted(client, indexed_array(shape, (700, 2000), "f4", kind="cupy"))
        check_transpose(client, a, "comm")


def test_blocks_of_any_memory_layout(client):
    x = np.arange(400 * 300.0).reshape(400, 300)
    a = on_gpu(x, (100, 300)).map_blocks(lambda b: b.copy(order="F"))
    b = on_gpu(x, (100, 300)).map_blocks(lambda b: b[::-1][::-1])
    for array in (a, b):
        y = dask_p2p.transpose(persisted(client, array))
        np.testing.assert_array_equal(y.compute().get(), x.T)


def test_wrong_blocks_are_named(client):
    import cupy

    x = on_gpu(np.ones((8, 8)), (2, 8))
    with pytest.raises(BlockMismatchError, match="declared as float64"):
        dask_p2p.transpose(
            x.map_blocks(lambda b: b.astype("f4"), meta=cupy.empty((0, 0)))
        ).compute()
    with pytest.raises(BlockMismatchError, match=r"declared as .*\(2, 8\)"):
        dask_p2p.transpose(x.map_blocks(lambda b: b[:1], meta=cupy.empty((0, 0)))).compute()


def test_object_dtype_is_refused(client):
    x = on_gpu(np.ones((4, 4)), (2, 4))
    x = x.map_blocks(lambda b: b, dtype=object, meta=np.empty((0, 0), object))
    with pytest.raises(BlockMismatchError, match="declared as object"):
        dask_p2p.transpose(x).compute()
