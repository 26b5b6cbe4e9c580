import pickle

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import fft
from dask_p2p.backends.numpy import NumpyBackend
from dask_p2p.engine.task import AssembleTask
from tests.support import layers_of, pairwise, persisted, run_of, spread
from tests.test_fft import assert_close, numbers

LIMIT_BYTES = 16_000


@pytest.fixture(autouse=True)
def small_blocks():
    with dask.config.set({"array.chunk-size": LIMIT_BYTES}):
        yield


def largest_block_bytes(y):
    """Of all that are assembled on the way, in complex numbers of double precision."""
    tasks = [task for task in dict(y.__dask_graph__()).values() if isinstance(task, AssembleTask)]
    assert tasks
    return max(16 * np.prod(task.plan.block(task.index).shape) for task in tasks)


@pytest.mark.parametrize(
    ("name", "n", "norm"),
    pairwise(
        ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"],
        [None, 3 * 5 * 7 * 11, 5000],
        [None, "ortho", "forward"],
    ),
)
def test_vectors(name, n, norm):
    a = numbers(4096, "d" if name in ("rfft", "ihfft") else "D")
    y = getattr(fft, name)(da.from_array(a, chunks=500), n, norm=norm)
    expected = getattr(np.fft, name)(a, n, norm=norm)
    assert y.dtype == expected.dtype
    assert_close(y, expected)
    if n != 1155:
        assert largest_block_bytes(y) <= LIMIT_BYTES
        assert y.numblocks[0] > 3


@pytest.mark.parametrize(
    ("shape", "chunks", "axis"),
    [((2, 3000), (1, 400), 1), ((3000, 2), (400, 2), 0), ((2, 3000, 2), (2, 400, 1), 1)],
)
@pytest.mark.parametrize("name", ["fft", "irfft"])
def test_beside_short_axes(shape, chunks, axis, name):
    a = numbers(shape)
    y = getattr(fft, name)(da.from_array(a, chunks=chunks), axis=axis)
    assert y.numblocks[axis] > 1
    assert_close(y, getattr(np.fft, name)(a, axis=axis))


@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_with_other_axes(name, axes):
    a = numbers((4, 3000), "d" if name == "rfftn" else "D")
    y = getattr(fft, name)(da.from_array(a, chunks=(2, 400)), axes=axes, norm="ortho")
    assert y.numblocks[1] > 1
    assert_close(y, getattr(np.fft, name)(a, axes=axes, norm="ortho"))


@pytest.mark.parametrize("char", "FGe")
def test_precision(char):
    a = numbers(4096, char)
    y = fft.fft(da.from_array(a, chunks=500))
    assert y.numblocks[0] > 1
    assert y.dtype == ("G" if char == "G" else "F")
    wide = np.fft.fft(a.astype("G" if char == "G" else "D"))
    assert y.compute(scheduler="sync").dtype == y.dtype
    np.testing.assert_allclose(y, wide, atol=abs(wide).max() * (1e-17 if char == "G" else 1e-6))


def test_three_exchanges_and_chunks_that_are_asked_for():
    x = da.from_array(numbers(4096), chunks=512)
    y = fft.fft(x)
    assert sum(name.startswith("p2p-") for name in layers_of(y)) == 3
    assert fft.fft(x, chunks=512).chunks == x.chunks
    assert fft.fft(x, chunks=-1).numblocks == (1,)
    assert_close(fft.ifft(fft.fft(x), chunks=x.chunks), x.compute())


def test_not_on_gpus(monkeypatch):
    x = da.from_array(numbers(4096), chunks=512)
    monkeypatch.setattr(NumpyBackend, "on_device", True)
    assert fft.fft(x).numblocks == (1,)


def test_on_workers(client):
    a = numbers(6000)
    x = spread(client, da.from_array(a, chunks=500))
    y = fft.fft(x)
    functions = [
        task.output.epilogue for task in dict(y.dask).values() if isinstance(task, AssembleTask)
    ]
    assert all(pickle.loads(pickle.dumps(epilogue)) == epilogue for epilogue in functions)
    y = persisted(client, y)
    assert_close(y.compute(), np.fft.fft(a))
    assert run_of(client, y) is None, "the last layer only folds"
