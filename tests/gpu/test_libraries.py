"""Programs of PyTorch and JAX over the memory of CuPy blocks, against the same ones in NumPy."""

import os
from functools import partial, wraps
from importlib import import_module

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate, map_on_gpu, spmd
from tests.backends.support import cupy
from tests.gpu.support import has_one_gpu_each, on_gpu
from tests.gpu.test_sections import UNEVEN, X, check, way
from tests.sections.iterate.test_coupled import both, inner, react

__all__ = ["way"]

pytestmark = pytest.mark.gpu(2)
U, V = abs(X) / 8, abs(X[::-1]) / 12
KINDS = {"torch": "Tensor", "jax": "Array"}


def enable(library):
    """Make JAX of this process compute with 64 bits."""
    if library == "jax":
        import_module("jax").config.update("jax_enable_x64", True)


def called_with(library, function):
    """Return the function, with a check of the kind of its first argument."""

    @wraps(function)
    def checked(u, *operands, **named):
        assert isinstance(u, getattr(import_module(library), KINDS[library]))
        return function(u, *operands, **named)

    return checked


@pytest.fixture(params=KINDS)
def library(request, client, monkeypatch):
    """The name of a library that computes on GPUs; JAX leaves memory to others there."""
    pytest.importorskip(request.param)

    def prepared(library):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        enable(library)
        module = import_module(library)
        return module.cuda.is_available() if library == "torch" else bool(module.devices("gpu"))

    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        has_gpus = all(client.run(prepared, request.param).values())
    except RuntimeError as exc:  # JAX without GPUs
        pytest.skip(str(exc))
    if not has_gpus:
        pytest.skip(f"{request.param} without GPUs")
    enable(request.param)
    return request.param


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_iterate(client, way, library, ranks, overlap):
    fields = {"u": on_gpu(U, UNEVEN), "v": on_gpu(V, UNEVEN)}
    record = {"mass": lambda u: inner(u).sum()}
    options = {"record": record, "ranks": ranks, "overlap": overlap, "as_library": library}
    result = iterate(called_with(library, react), fields, 1, 30, **options)
    expected = both({"u": U, "v": V}, 1, 30, [(react, "uv")])
    for name, value in expected.items():
        check(result[name], value)
    np.testing.assert_allclose(result["mass"].compute()[-1], expected["u"].sum(), rtol=1e-9)


def test_results_that_are_dropped_at_once(client, library):
    """The library may reuse their memory, but not before the GPU has copied them."""
    x = da.zeros((2, 2**24), chunks=(1, -1)).map_blocks(cupy.asarray)

    def step(u):
        return u + 1

    result = iterate(called_with(library, step), x, 0, 300, as_library=library)
    assert abs(result - 300).max().compute() == 0


def test_spmd(client, library):
    def normalized(ctx, x):
        total = ctx.allreduce(float((x**2).sum()))
        return x / total**0.5

    def checked(ctx, x):
        return called_with(library, partial(normalized, ctx))(x)

    check(spmd(checked, on_gpu(X, UNEVEN), as_library=library), X / (X**2).sum() ** 0.5)


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_map_on_gpu(client, library, where):
    x = da.from_array(X, chunks=UNEVEN) if where == "host" else on_gpu(X, UNEVEN)

    def sines(x):
        module = import_module({"jax": "jax.numpy"}.get(library, library))
        return called_with(library, module.sin)(x)

    options = {"as_library": library, "dtype": float, "part_bytes": 4000}
    (actual,) = dask.compute(map_on_gpu(sines, x, **options))
    actual = actual.get() if where == "gpu" else actual
    np.testing.assert_allclose(actual, np.sin(X), rtol=1e-12)


def test_a_group_of_nccl(client):
    def summed(ctx, x):
        import cupy
        from cupy.cuda import nccl

        group = nccl.NcclCommunicator(ctx.size, ctx.nccl_id(), ctx.rank)
        stream, total = cupy.cuda.get_current_stream(), cupy.empty_like(x)
        kinds = nccl.NCCL_FLOAT64, nccl.NCCL_SUM
        group.allReduce(x.data.ptr, total.data.ptr, x.size, *kinds, stream.ptr)
        stream.synchronize()
        group.destroy()
        return total

    pytest.importorskip("cupy.cuda.nccl")
    if not has_one_gpu_each():
        pytest.skip("NCCL takes one rank of a GPU")
    x = on_gpu(np.arange(8.0).reshape(2, 4), (1, 4))
    check(spmd(summed, x, ranks=2), np.tile(np.arange(8.0).reshape(2, 4).sum(0), (2, 1)))
