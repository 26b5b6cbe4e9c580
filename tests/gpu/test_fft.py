"""Fourier transforms of CuPy blocks, by cuFFT: the values are those of NumPy."""

from __future__ import annotations

from functools import partial

import dask
import numpy as np
import pytest

from dask_p2p import fft
from tests.gpu.support import on_gpu, on_host
from tests.support import persisted, used

pytestmark = pytest.mark.gpu(2)

RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, 30, 35)) + 1j * RNG.standard_normal((24, 30, 35))
CUTS = [(6, -1, -1), (-1, 8, -1), (-1, -1, 9), (12, 15, -1), (12, 15, 18)]
PRECISION = {"f": 1e-6, "F": 1e-6, "d": 1e-13, "D": 1e-13}


def assert_close(actual, expected, char):
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max(initial=0) <= PRECISION[char] * np.abs(expected).max(
        initial=0
    )


def declared(y):
    """Whether all blocks are CuPy's and of the declared dtype."""
    dtype = y.dtype

    def check_declared(block):
        kind = type(block).__module__.partition(".")[0]
        return np.full((1,) * block.ndim, kind == "cupy" and block.dtype == dtype)

    return bool(
        y.map_blocks(
            check_declared,
            chunks=tuple((1,) * n for n in y.numblocks),
            meta=np.empty((0,) * y.ndim, bool),
        )
        .compute()
        .all()
    )


@pytest.mark.parametrize("transport", ["ipc", "ucx"])
@pytest.mark.parametrize("chunks", CUTS, ids=str)
@pytest.mark.parametrize(
    ("char", "real"), [*((char, False) for char in "fFdD"), ("f", True), ("d", True)]
)
def test_there_and_back(client, transport, chunks, char, real):
    a = X.real.astype(char) if char in "fd" else X.astype(char)
    wide = a.astype("d" if real else "D")
    x = persisted(client, on_gpu(a, chunks))
    with dask.config.set({"p2p.transports.order": [transport]}):
        y = persisted(client, (fft.rfftn if real else fft.fftn)(x))
        inverse = partial(fft.irfftn, s=a.shape) if real else fft.ifftn
        z = persisted(client, inverse(y, chunks=x.chunks))
    assert used(client, y) <= {transport}
    assert y.dtype == np.dtype("F" if char in "fF" else "D")
    assert z.dtype == (a.dtype if real else y.dtype)
    assert declared(y)
    assert declared(z)
    assert_close(on_host(y), (np.fft.rfftn if real else np.fft.fftn)(wide), char)
    assert z.chunks == x.chunks
    assert_close(on_host(z), wide, char)
    np.testing.assert_array_equal(on_host(x), a)


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1), (0, 2), (1,), (0,)])
def test_blocks_that_lie_otherwise(client, axes, real):
    """Views, and blocks as Fortran has them, are read as they lie, and stay what they are."""
    a = X.real.copy() if real else X
    transformed, restored, numpy_transform = (
        (fft.rfftn, fft.irfftn, np.fft.rfftn) if real else (fft.fftn, fft.ifftn, np.fft.fftn)
    )
    expected, s = numpy_transform(a, axes=axes), [a.shape[axis] for axis in axes]
    for lies in (lambda block: block.copy(order="F"), lambda block: block.repeat(2, 2)[..., ::2]):
        x = persisted(client, on_gpu(a, (12, -1, -1)).map_blocks(lies))
        y = persisted(client, transformed(x, axes=axes))
        assert_close(on_host(y), expected, "D")
        assert_close(on_host(persisted(client, restored(y, s=s, axes=axes))), a, "D")
        np.testing.assert_array_equal(on_host(x), a)


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
@pytest.mark.parametrize("n", [None, 17, 64])
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_along_one_axis(client, name, n, norm):
    a = X if name not in ("rfft", "ihfft") else X.real
    for axis in range(3):
        y = persisted(client, getattr(fft, name)(on_gpu(a, (12, 15, 18)), n, axis, norm))
        assert declared(y)
        assert_close(on_host(y), getattr(np.fft, name)(a, n, axis, norm), "d")


@pytest.mark.parametrize("char", "?bHle")
def test_dtypes_that_are_converted(client, char):
    a = (X.real > 0).astype(char)
    y = persisted(client, fft.fftn(on_gpu(a, (6, -1, -1))))
    assert y.dtype == np.dtype("F" if char == "e" else "D")
    assert declared(y)
    assert_close(on_host(y), np.fft.fftn(a.astype("d")), "F" if char == "e" else "D")


def test_empty_blocks_shifts_and_frequencies(client):
    assert on_host(fft.fftn(on_gpu(X[:0], (1, 15, -1)), axes=(1, 2))).shape == (0, 30, 35)
    x = on_gpu(X, (7, 15, -1))
    np.testing.assert_array_equal(on_host(fft.fftshift(x)), np.fft.fftshift(X))
    k = fft.fftfreq(30, 0.5, chunks=7, like=x)
    assert declared(k)
    np.testing.assert_allclose(on_host(k), np.fft.fftfreq(30, 0.5))
