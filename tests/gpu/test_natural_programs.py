"""Programs as one first writes them, with CuPy blocks: right by default, or refused at once."""

from __future__ import annotations

import numpy as np
import pytest

from dask_p2p import iterate
from dask_p2p.errors import BlockMismatchError, InputError
from tests.gpu.support import on_gpu, on_host
from tests.gpu.test_sections import UNEVEN, X, check, nine, way
from tests.sections.iterate.test_iterate import reference

__all__ = ["way"]

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("boundary", ["periodic", "reflect", "nearest", 0.5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"capture": True}], ids=str)
def test_functions_that_read_corners(client, way, options, ranks, boundary):
    y = iterate(nine, on_gpu(X, UNEVEN), 1, 50, boundary=boundary, ranks=ranks, **options)
    check(y, reference(nine, [X], 1, 50, boundary)[0])


def test_cubes_whose_functions_read_corners(client, way):
    def box(u, out):
        out[...] = 0
        for i in range(3):
            for j in range(3):
                for k in range(3):
                    ends = (n - 2 for n in u.shape)
                    at = zip((i, j, k), ends, strict=True)
                    out += (1 + i + 3 * j + 9 * k) / 405 * u[tuple(slice(s, s + n) for s, n in at)]

    x = np.random.default_rng(0).normal(size=(20, 24, 18))
    for boundary in ("periodic", "nearest"):
        for ranks in (2, 4):
            y = iterate(box, on_gpu(x, (10, 8, 9)), 1, 20, boundary=boundary, ranks=ranks)
            check(y, reference(box, [x], 1, 20, boundary)[0])


@pytest.mark.parametrize("dtype", ["f8", "i8", "u1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_corners_that_are_asked_not_to_be_exchanged(client, way, ranks, dtype):
    def star(u, out):
        out[...] = u[2:, 1:-1] + u[:-2, 1:-1]

    def corner(u, out):
        out[...] = u[2:, 2:]

    x = np.arange(X.size).reshape(X.shape).astype(dtype)
    y = iterate(star, on_gpu(x, UNEVEN), 1, 5, corners=False, ranks=ranks)
    assert np.array_equal(on_host(y), reference_of(star, x))
    with pytest.raises(InputError, match=r"corners=False: expected .* Leave corners=False out"):
        iterate(corner, on_gpu(x, UNEVEN), 1, 5, corners=False, ranks=ranks).compute()


def reference_of(function, x):
    for _ in range(5):
        new = np.empty_like(x)
        function(np.pad(x, 1, "wrap"), new)
        x = new
    return x


@pytest.mark.parametrize("dtype", ["i8", "i4", "u1", "?"])
def test_fractions_in_fields_of_integers_are_refused(client, dtype):
    x = np.zeros(X.shape, dtype)  # the first step makes no fractions
    x[3, 4] = 4

    def step_whole(u, out):
        out[...] = (u[2:] * 1.0 + u[:-2]) / 2

    def in_parts(u, out):
        out[:2] = 0.5 * u[1:3]
        out[2:] = 1

    for function in (step_whole, in_parts):
        with pytest.raises(BlockMismatchError, match=r"dtype="):
            iterate(function, on_gpu(x, UNEVEN), {0: 1}, 3).compute()


def test_imaginary_parts_in_real_fields_are_refused(client):
    def turned(u, out):
        out[...] = 1j * u

    with pytest.raises(BlockMismatchError, match="complex128"):
        iterate(turned, on_gpu(X, UNEVEN), 0, 3).compute()


def test_kernels_that_take_pointers_fill_out(client):
    """They write to the address of `out`, whatever class it has."""

    def tripled(u, out):
        import cupy

        kernel = cupy.ElementwiseKernel("T x", "T y", "y = 3 * x")
        kernel(u, out)

    for dtype in ("i4", "f4"):
        x = np.arange(X.size).reshape(X.shape).astype(dtype)
        y = iterate(tripled, on_gpu(x, UNEVEN), 0, 2)
        assert np.array_equal(on_host(y), 9 * x)


@pytest.mark.parametrize("dtype", ["u4", "f4", "f8", "i8"])
def test_data_that_equal_the_marks_of_unfilled_memory(client, dtype):
    def copied(u, out):
        out[...] = u

    bits = b"\xa5" * (X.size * np.dtype(dtype).itemsize)
    x = np.frombuffer(bits, dtype).reshape(X.shape)
    y = iterate(copied, on_gpu(x, UNEVEN), 0, 3)
    assert np.array_equal(on_host(y), x)
