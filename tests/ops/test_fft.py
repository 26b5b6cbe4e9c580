import tracemalloc
from argparse import Namespace
from itertools import permutations

import numpy as np
import pytest

from dask_p2p.backends import memory_order
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import MemoryLimitError
from dask_p2p.ops.fft import local as local_fft
from dask_p2p.ops.fft.local import INVERSE, TO_COMPLEX, TO_REAL, LocalTransform, columns_of
from dask_p2p.ops.fft.stages import plan_local_transforms
from tests.support import noted

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


def test_own_blocks_are_overwritten_and_others_are_not():
    x = np.random.default_rng(0).random((6, 8)) + 0j
    original = x.copy()
    steps = (("fftn", (0,), (6,)),)
    expected = np.fft.fft(x, axis=0)
    np.testing.assert_allclose(LocalTransform(steps, "backward")(x), expected, atol=1e-12)
    np.testing.assert_array_equal(x, original)
    block = np.ascontiguousarray(x.T)
    result = LocalTransform(steps, "backward", order=(1, 0))(block[...])
    np.testing.assert_allclose(result, expected, atol=1e-12)
    assert np.shares_memory(result, block)
    assert result is not block


@pytest.mark.parametrize(
    ("steps", "char"),
    [
        *(([FFT], char) for char in "Ddf"),
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


@pytest.mark.parametrize("norm", [None, "backward", "ortho", "forward"])
@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_transform_of_several_stages_is_scaled_as_a_whole(kind, norm, on_device):
    x = np.random.default_rng(0).random((3, 4, 5))
    x = x if kind in TO_COMPLEX else x + 1j * np.random.default_rng(1).random(x.shape)
    special = None if kind in ("fft", "ifft") else 2
    lengths = {0: 3, 1: 4, 2: 8 if kind in TO_REAL else 5}
    stages = [(1, 2), (), (0,)] if kind in TO_COMPLEX else [(0,), (1, 2), ()]
    transforms = plan_local_transforms(kind, special, lengths, norm, stages, on_device)
    assert [local is None for local in transforms] == [not axes for axes in stages]
    result = x
    for local in transforms:
        result = result if local is None else local(result)
    plain = np.fft.ifft if kind in INVERSE else np.fft.fft
    run = getattr(np.fft, kind)
    if kind in TO_REAL:
        expected = run(plain(plain(x, 3, 0, norm), 4, 1, norm), 8, 2, norm)
    else:
        expected = plain(plain(run(x, 5, 2, norm), 4, 1, norm), 3, 0, norm)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-12)


fft = pytest.importorskip("scipy.fft")

SHAPES = [
    ((1024, 64), 0, "D", 64),
    ((512, 136), 0, "D", 0),
    ((512, 128), 0, "D", 64),
    ((256, 256), 0, "D", 64),
    ((2, 257, 256), 1, "D", 64),
    ((256, 4, 64), 0, "D", 64),
    ((1021, 8, 10 * 16), 0, "D", 64),
    ((8192, 256), 0, "D", 32),
    ((1024, 512), 0, "F", 64),
    ((512, 1500 * 4), 0, "F", 0),
    ((2**15, 256), 0, "D", 0),  # its columns would take much memory
    ((256, 1024), 1, "D", 0),
    ((256, 256), 0, "d", 0),
]


@pytest.mark.parametrize(("shape", "axis", "char", "columns"), SHAPES)
def test_columns_at_a_time(shape, axis, char, columns):
    assert columns_of(np.empty(shape, char), (axis,)) == columns


def test_views_and_several_axes_are_transformed_at_once():
    block = np.empty((256, 512), "D")
    assert columns_of(block[:, ::2], (0,)) == 0
    assert columns_of(block, (0, 1)) == 0


@pytest.mark.parametrize("norm", ["backward", "ortho"])
@pytest.mark.parametrize("name", ["fftn", "ifftn"])
@pytest.mark.parametrize(("shape", "axis", "char", "columns"), [s for s in SHAPES if s[3]])
def test_values_in_columns(shape, axis, char, columns, name, norm, monkeypatch):
    rng = np.random.default_rng(0)
    block = (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(char)
    expected = getattr(fft, name)(block, axes=(axis,), norm=norm)
    used = noted(monkeypatch, local_fft, "transform_columns", lambda *args: args[3])
    order = tuple(range(block.ndim))
    transform = LocalTransform(((name, (axis,), (shape[axis],)),), norm, order)
    result = transform(block)
    assert used == [columns]
    assert np.shares_memory(result, block)
    assert result.tobytes() == expected.tobytes()


def test_blocks_of_others_and_padded_ones_are_transformed_at_once(monkeypatch):
    monkeypatch.setattr(local_fft, "transform_columns", None)
    block = np.random.default_rng(0).random((256, 256)) + 0j
    steps = (("fftn", (0,), (256,)),)
    np.testing.assert_array_equal(LocalTransform(steps, "backward")(block), fft.fft(block, axis=0))
    padded = (("fftn", (0,), (300,)),)
    expected = fft.fft(block, 300, axis=0)
    np.testing.assert_array_equal(LocalTransform(padded, "backward", (0, 1))(block), expected)
