from __future__ import annotations

import tracemalloc
from argparse import Namespace
from itertools import permutations

import numpy as np
import pytest

from dask_p2p.backends import memory_order
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import MemoryLimitError
from dask_p2p.ops.fft import local as local_fft
from dask_p2p.ops.fft.local import LocalTransform

FFT, PADDED = ("fftn", (0, 1), (600, 80)), ("ifftn", (1,), (200,))
RFFT, IRFFT = ("rfft", (1,), (80,)), ("irfft", (1,), (158,))


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_blocks_are_transformed_as_they_lie(order):
    x = np.random.default_rng(0).random((4, 5, 6)) + 0j
    lies = x.transpose(order).copy().transpose(np.argsort(order))
    assert memory_order(lies.strides) == order
    result = LocalTransform((("fftn", (0, 2), (4, 6)),), "backward")(lies)
    np.testing.assert_allclose(result, np.fft.fftn(x, axes=(0, 2)), atol=1e-12)
    assert memory_order(result.strides) == order


@pytest.mark.parametrize(
    ("steps", "char"),
    [
        ([FFT], "D"),
        ([FFT], "d"),
        ([FFT], "f"),
        ([PADDED], "F"),
        ([RFFT, ("fftn", (0,), (600,))], "d"),
        ([RFFT, ("fftn", (0,), (999,))], "f"),
        ([("ifftn", (0,), (600,)), IRFFT], "D"),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0), None])
def test_memory_that_it_takes(steps, char, order):
    transform = LocalTransform(tuple(steps), "ortho", order)
    block = np.zeros((600, 80), char)
    block = block if order != (1, 0) else np.ascontiguousarray(block.T)
    extra_bytes = transform.extra_bytes(block.shape, block.dtype)
    if order is None and char in "FD" and steps != [PADDED]:
        extra_bytes += block.nbytes  # another's block is not overwritten
    transform(block)  # what is imported
    peaks_bytes = []
    for _ in range(5):  # other threads, of clusters before, take memory at times
        tracemalloc.start()
        try:
            transform(block)
            peaks_bytes.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert extra_bytes <= min(peaks_bytes) <= extra_bytes + 100_000


def test_what_cannot_fit_is_named_and_copies_are_made_in_memory_of_before(monkeypatch):
    block, shapes = np.ones((600, 80), "D"), []

    class Context:
        address = "worker-a"
        limit_bytes = 2 * block.nbytes

        def memory_below(self, wanted_bytes, kind):
            return self.limit_bytes if wanted_bytes > self.limit_bytes else None

        def empty_output(self, shape, dtype, queue):
            shapes.append(queue.empty(shape, dtype))
            return shapes[-1]

    context = Context()
    monkeypatch.setattr(local_fft, "current_worker", lambda: (Namespace(), context))
    result = LocalTransform((FFT,), "backward")(block)
    assert np.shares_memory(result, shapes[0])
    assert (block == 1).all()
    for step, char, result_bytes in ((RFFT, "d", 600 * 41 * 16), (FFT, "D", 600 * 80 * 16)):
        transform, block = LocalTransform((step,), "backward"), np.ones((600, 80), char)
        context.limit_bytes = block.nbytes + result_bytes
        transform(block)
        context.limit_bytes -= 1
        monkeypatch.setattr(NUMPY, "empty", lambda *_: pytest.fail("it allocates"), raising=False)
        with pytest.raises(MemoryLimitError, match="worker worker-a, got one") as caught:
            transform(block)
        assert caught.value.missing_bytes == 1
        monkeypatch.undo()
        monkeypatch.setattr(local_fft, "current_worker", lambda: (Namespace(), context))
