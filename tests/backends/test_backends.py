import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p import backends
from dask_p2p.backends import backend_for, backend_named, checked_block, dtype_text
from dask_p2p.backends import cupy as backends_cupy
from dask_p2p.errors import BlockMismatchError, TransferError, UnsupportedArrayError
from dask_p2p.transports.base import PROBE_BYTES, Probes, probe_key
from dask_p2p.transports.buffers import Buffers
from tests.support import loaded_anew, output_of


def test_scalars_become_arrays():
    array = backends.as_array(np.float32(3))
    assert (type(array), array.dtype, array.shape) == (np.ndarray, np.dtype("f4"), ())
    record = backends.as_array(np.zeros((), [("a", "i1"), ("b", "f8")])[()])
    assert (record.dtype.names, record.shape) == (("a", "b"), ())
    block = np.ones(3)
    assert backends.as_array(block) is block


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
        (type("Foreign", (), {"__module__": "foreign.core"})(), r"foreign\.core\.Foreign"),
    ],
)
def test_others_are_refused_by_name(block, kind):
    match = rf"(?s)expected .*got .*{kind}.*(Convert|Fill|np\.asarray)"
    with pytest.raises(UnsupportedArrayError, match=match):
        backend_for(block)


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
    monkeypatch.setitem(backends.BACKENDS, "library", backend)
    array = backend.empty((2, 3), "f4")
    array[...] = np.arange(6).reshape(2, 3)
    assert backend_for(array) is backend_named("library") is backend
    with backends.device_of(array):
        queue = backend.queue()
    assert queue.kind == "library"
    turned = queue.empty((3, 2), "f4")
    queue.permute(turned, array, (1, 0))
    assert (turned == array.T).all()
    assert backends.checksum(array) == backends.checksum(np.asarray(array))
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


F8 = np.dtype("f8")


@pytest.mark.parametrize(
    ("block", "error", "words"),
    [
        (np.ones((2, 4)), BlockMismatchError, r"float64 \(2, 3\).*it is float64 \(2, 4\)"),
        (np.ones((3, 2)), BlockMismatchError, r"it is float64 \(3, 2\)"),
        (np.ones((2, 3), "f4"), BlockMismatchError, r"it is float32 \(2, 3\)"),
        (np.ones((2, 3), ">i8"), BlockMismatchError, r"it is >i8 \(2, 3\)"),
        (np.ma.masked_array(np.ones((2, 3))), UnsupportedArrayError, "(?i)masked"),
        ([[1.0] * 3] * 2, UnsupportedArrayError, "list"),
    ],
    ids=["length", "order", "dtype", "other dtype", "masked", "list"],
)
def test_a_block_that_is_not_as_declared(block, error, words):
    good = np.ones((2, 3))
    assert checked_block(good, "key", (2, 3), F8) is good
    with pytest.raises(error, match=words):
        checked_block(block, "key", (2, 3), F8)


ONE, MIXED = ">i4", [("a", ">i2"), ("b", "<f8"), ("c", [("d", ">u4", (2,))])]


@pytest.mark.parametrize("declared", [ONE, ">f8", ">c8", ">M8[s]", ">U3", MIXED], ids=str)
def test_a_block_in_another_byte_order_is_converted(declared):
    declared = np.dtype(declared)
    raw = np.arange(3 * declared.itemsize, dtype="u1") if declared.kind != "U" else None
    block = np.array(["ab", "c", "\u20ac"], declared) if raw is None else raw.view(declared)
    for real in (declared.newbyteorder("="), declared.newbyteorder("S"), declared):
        result = checked_block(block.astype(real), "key", (3,), declared)
        assert result.dtype == declared
        assert result.tobytes() == block.tobytes()
        if real != declared:
            with pytest.raises(TransferError, match="only comm changes the byte order"):
                backends.check_dtype_text("block", dtype_text(declared), dtype_text(real))
    opaque = np.zeros(3, declared.newbyteorder("=")).view(f"V{declared.itemsize}")
    with pytest.raises(BlockMismatchError):
        checked_block(opaque, "key", (3,), declared)
    with pytest.raises(BlockMismatchError):
        backends.check_dtype_text("block", dtype_text(declared), dtype_text(opaque.dtype))


@pytest.mark.parametrize(
    ("one", "second"),
    [
        ("f8", ">f8"),
        ("i8", "M8[ns]"),
        ("M8[s]", "M8[ns]"),
        ("S4", "V4"),
        ("u1", "?"),
        ([("a", "i1"), ("b", "f8")], [("a", "i1"), ("b", "i8")]),
        ([("a", "i4"), ("b", "f4")], [("b", "i4"), ("a", "f4")]),
        ([("a", "i4", (2,))], [("a", "i4", (2, 1))]),
        ([("a", [("b", "i4")])], [("a", [("b", "f4")])]),
        (
            {"names": "ab", "formats": ["i1", "i1"], "offsets": [0, 1], "itemsize": 4},
            {"names": "ab", "formats": ["i1", "i1"], "offsets": [0, 2], "itemsize": 4},
        ),
    ],
    ids=str,
)
def test_text_of_dtypes_tells_them_apart(one, second):
    one, second = np.dtype(one), np.dtype(second)
    assert one.itemsize == second.itemsize
    assert one != second
    assert dtype_text(one) != dtype_text(second)
    assert dtype_text(one) == dtype_text(one.newbyteorder().newbyteorder())
