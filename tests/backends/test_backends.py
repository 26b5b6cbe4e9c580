import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.backends import BACKENDS, as_array, backend_for, backend_named, checksum, device_of
from dask_p2p.backends import cupy as backends_cupy
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.transports.base import PROBE_BYTES, Probes, probe_key
from dask_p2p.transports.buffers import Buffers
from tests.support import loaded_anew, output_of


def test_scalars_become_arrays():
    array = as_array(np.float32(3))
    assert (type(array), array.dtype, array.shape) == (np.ndarray, np.dtype("f4"), ())
    record = as_array(np.zeros((), [("a", "i1"), ("b", "f8")])[()])
    assert (record.dtype.names, record.shape) == (("a", "b"), ())
    block = np.ones(3)
    assert as_array(block) is block


def test_memory_maps_are_plain_arrays(tmp_path):
    block = np.memmap(tmp_path / "block", "f4", "w+", shape=(3, 4))
    assert backend_for(block).name == "numpy"


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (np.ones((2, 2)).view(np.matrix), "matrix"),
        ([1, 2], "builtins.list"),
        (memoryview(b"12"), "memoryview"),
    ],
)
def test_others_are_refused_by_name(block, kind):
    with pytest.raises(UnsupportedArrayError, match=rf"(?s)expected .*got .*{kind}.*Convert|Fill"):
        backend_for(block)


def test_an_array_of_another_package_is_refused():
    foreign = type("Foreign", (), {"__module__": "foreign.core"})
    with pytest.raises(UnsupportedArrayError, match=r"foreign\.core\.Foreign.*np\.asarray"):
        backend_for(foreign())


@pytest.mark.parametrize("method", ["todense", "toarray"])
def test_sparse_blocks_are_told_how_to_become_dense(method):
    sparse = type("COO", (), {"__module__": "sparse.core", method: lambda block: np.ones(2)})
    with pytest.raises(UnsupportedArrayError, match=r"sparse\.core\.COO") as caught:
        backend_for(sparse())
    assert f"map_blocks(lambda block: block.{method}())" in str(caught.value)


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


@pytest.mark.parametrize(
    ("wanted_bytes", "limit_bytes", "expected"),
    [(10, None, None), (10, 0, None), (10, 10, None), (10, 9, 9)],
)
def test_host_memory_is_what_the_worker_may_have(wanted_bytes, limit_bytes, expected):
    assert backend_named("numpy").memory_below(wanted_bytes, limit_bytes) == expected


class LibraryArray(np.ndarray):
    """An array of another library."""

    __module__ = "library.core"


class LibraryBackend(type(backend_named("numpy"))):
    name, title = "library", "Library"

    def check(self, block):
        pass

    def empty(self, shape, dtype):
        return np.empty(shape, dtype).view(LibraryArray)


def test_another_library_is_one_backend_in_the_registry(monkeypatch):
    backend = LibraryBackend()
    monkeypatch.setitem(BACKENDS, "library", backend)
    array = backend.empty((2, 3), "f4")
    array[...] = np.arange(6).reshape(2, 3)
    assert backend_for(array) is backend_named("library") is backend
    with device_of(array):
        queue = backend.queue()
    assert queue.kind == "library"
    turned = queue.empty((3, 2), "f4")
    queue.permute(turned, array, (1, 0))
    assert (turned == array.T).all()
    assert checksum(array) == checksum(np.asarray(array))
    assert Buffers("library", 0).take((2, 3), "f4").shape == (2, 3)
    assert len(Probes().block(probe_key("library"))) == PROBE_BYTES
    with pytest.raises(UnsupportedArrayError, match=r"one of the array libraries.*library, got"):
        backend_named("torch")


class Resource:
    """A memory resource of RMM."""

    def __init__(self, upstream=None, pool_bytes=None):
        if upstream is not None:
            self.get_upstream = lambda: upstream
        if pool_bytes is not None:
            self.pool_size = lambda: pool_bytes


CudaMemoryResource, ManagedMemoryResource, PoolMemoryResource = (
    type(f"{kind}MemoryResource", (Resource,), {}) for kind in ("Cuda", "Managed", "Pool")
)


@pytest.mark.parametrize(
    ("resource", "expected_bytes", "status"),
    [
        (CudaMemoryResource(), 1000, ("CudaMemoryResource", None)),
        (ManagedMemoryResource(), None, ("ManagedMemoryResource", None)),
        (Resource(PoolMemoryResource(CudaMemoryResource(), 7)), 1000, ("PoolMemoryResource", 7)),
        (Resource(PoolMemoryResource(ManagedMemoryResource(), 7)), None, ("PoolMemoryResource", 7)),
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
    facts = module.CUPY.device_status()
    assert (facts["memory_resource"], facts["pool_bytes"]) == status


def test_numpy_blocks_do_not_need_cupy():
    code = (
        "import sys, numpy; from dask_p2p.backends import backend_for;"
        "b = backend_for(numpy.zeros(3)); b.queue().empty((2,), 'f4'); b.warm_up();"
        "assert not {'cupy', 'dask_p2p.backends.kernels.cuda'} & set(sys.modules)"
    )
    output_of("-c", code)
