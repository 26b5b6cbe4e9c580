import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.backends import (
    backend_for,
    backend_named,
    worker_backend,
)
from dask_p2p.backends import cupy as backends_cupy
from dask_p2p.errors import UnsupportedArrayError
from tests.support import loaded_anew


@pytest.mark.parametrize("method", ["todense", "toarray"])
def test_sparse_blocks_are_told_how_to_become_dense(method):
    sparse = type("COO", (), {"__module__": "sparse.core", method: lambda block: np.ones(2)})
    with pytest.raises(UnsupportedArrayError, match=r"sparse\.core\.COO") as caught:
        backend_for(sparse())
    assert f"map_blocks(lambda block: block.{method}())" in str(caught.value)


def test_unknown_names_are_refused():
    with pytest.raises(UnsupportedArrayError, match="one of the array libraries cupy, numpy"):
        backend_named("torch")


def test_a_missing_cupy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    backend = loaded_anew(backends_cupy.__name__).CUPY
    for use in (
        lambda: backend.module,
        lambda: backend.empty((2,), "f4"),
        lambda: backend.permute_into(None, None, ()),
        backend.queue,
        backend.warm_up,
        lambda: backend.allocate(8),
    ):
        with pytest.raises(UnsupportedArrayError, match=r"importable CuPy.*dask-p2p\[cuda13\]"):
            use()


def test_a_block_of_cupy_gets_the_cupy_backend(monkeypatch):
    kind = type("ndarray", (), {"__module__": "cupy"})
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=kind))
    assert backend_for(kind()) is backend_named("cupy")
    sparse = type("csr_matrix", (), {"__module__": "cupy.sparse"})
    with pytest.raises(UnsupportedArrayError, match="got csr_matrix of CuPy"):
        backend_for(sparse())


def test_a_worker_computes_with_cupy_where_that_is_in_use(monkeypatch):
    monkeypatch.setattr(backends_cupy, "on_gpu", lambda: False)
    assert worker_backend() is backend_named("numpy")
    monkeypatch.setattr(backends_cupy, "on_gpu", lambda: True)
    assert worker_backend() is backend_named("cupy")


class Resource:
    """A memory resource of RMM."""

    def __init__(self, upstream=None, pool_bytes=None):
        if upstream is not None:
            self.get_upstream = lambda: upstream
        if pool_bytes is not None:
            self.pool_size = lambda: pool_bytes


class CudaMemoryResource(Resource):
    pass


class ManagedMemoryResource(Resource):
    pass


class PoolMemoryResource(Resource):
    pass


@pytest.mark.parametrize(
    ("resource", "expected_bytes", "status"),
    [
        (CudaMemoryResource(), 1000, ("CudaMemoryResource", None)),
        (ManagedMemoryResource(), None, ("ManagedMemoryResource", None)),
        (
            Resource(PoolMemoryResource(CudaMemoryResource(), 7)),
            1000,
            ("PoolMemoryResource", 7),
        ),
        (
            Resource(PoolMemoryResource(ManagedMemoryResource(), 7)),
            None,
            ("PoolMemoryResource", 7),
        ),
        (Resource(Resource(CudaMemoryResource())), 1000, ("CudaMemoryResource", None)),
    ],
)
def test_what_rmm_takes_memory_from(monkeypatch, resource, expected_bytes, status):
    """Statistics and pools are looked through; managed memory goes beyond the GPU's own."""
    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeError,
        getDevice=lambda: 0,
        getDeviceProperties=lambda device: {"name": b"A GPU", "uuid": bytes(16)},
        memGetInfo=lambda: (500, 1000),
    )
    cuda = SimpleNamespace(
        runtime=runtime, Device=lambda number: nullcontext(), get_allocator=lambda: None
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    mr = SimpleNamespace(get_current_device_resource=lambda: resource)
    monkeypatch.setitem(sys.modules, "rmm", SimpleNamespace(mr=mr))
    module = loaded_anew(backends_cupy.__name__)
    monkeypatch.setattr(module, "link_gbs", lambda uuid: None)
    assert module.CUPY.memory_below(1000, 1) is None
    assert module.CUPY.memory_below(1001, None) == expected_bytes
    assert module.CUPY.device_bytes() == (expected_bytes or 0)
    found = module.CUPY.device_status()
    assert (found["memory_resource"], found["pool_bytes"]) == status
