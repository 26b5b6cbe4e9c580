"""Arrays of other libraries over the memory of blocks: of a library that has nothing but DLPack."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from dask_p2p.backends import dlpack
from dask_p2p.backends.dlpack import LibraryFunction
from dask_p2p.backends.host import IdentityCache
from dask_p2p.errors import BlockMismatchError, InputError, MissingPackageError
from tests.support import BOUND_S


class Tensor:
    """An array that only DLPack can describe."""

    def __init__(self, values, device=(1, 0)):
        self.values, self.device, self.dtype = values, device, values.dtype

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


def install(monkeypatch, *modules):
    """Have libraries looked up in these modules, each time."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dlpack, "_load_library", dlpack._load_library.__wrapped__)


@pytest.fixture
def torch(monkeypatch):
    module = ModuleType("torch")
    module.Tensor, module.cuda = Tensor, SimpleNamespace(is_available=lambda: False)
    module.from_dlpack = lambda array: Tensor(np.from_dlpack(array))
    install(monkeypatch, module)
    return module


@pytest.fixture
def jax(monkeypatch):
    module = ModuleType("jax")

    class Array(Tensor):
        def block_until_ready(self):
            self.was_ready = True

    module.Array, module.dlpack = Array, ModuleType("jax.dlpack")
    module.dlpack.from_dlpack = lambda array: Array(np.from_dlpack(array))
    install(monkeypatch, module, module.dlpack)
    return module


def test_a_function_gets_arrays_of_the_library_over_the_same_memory(torch):
    def doubled(a, levels, out, at, count):
        assert all(isinstance(array, Tensor) for array in (a, *levels, out.u, at.index))
        assert count == 3
        a.values[...] = 7
        return {"u": Tensor(2 * levels[1].values)}

    class Position:
        def with_indices(self, convert):
            return SimpleNamespace(index=convert(np.arange(2)))

    a, b, u = np.zeros(4), np.ones(4), np.zeros(4)
    function = LibraryFunction(doubled, "torch")
    result = function(a, (a, b), SimpleNamespace(u=u), at=Position(), count=3)
    assert type(result["u"]) is np.ndarray
    assert result["u"].tolist() == [2] * 4
    assert a.tolist() == [7] * 4


def test_a_read_only_array_is_passed_without_a_copy_if_its_memory_is_writable(torch):
    memory = np.zeros(4)
    view = memory.view()
    view.flags.writeable = False
    constant = np.frombuffer(bytes(32))
    is_shared = LibraryFunction(lambda a, b: np.shares_memory(a.values, np.asarray(b)), "torch")
    assert is_shared(view, SimpleMemory(memory))
    assert not is_shared(constant, SimpleMemory(constant))


class SimpleMemory:
    """An argument that is no array."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__


def test_other_values_are_unchanged(torch):
    masked, arrays = np.ma.masked_array([1.0], [True]), [np.ones(2)]
    function = LibraryFunction(lambda *values: values, "torch")
    result = function(masked, arrays, "text", None, np.float64(2))
    assert result[0] is masked
    assert result[1:] == (arrays, "text", None, 2)


def test_arrays_that_dlpack_lacks_are_refused(torch):
    function = LibraryFunction(lambda a: a, "torch")
    with pytest.raises(
        InputError, match="arrays that torch can use, got one of NumPy of dtype >f8"
    ):
        function(np.zeros(3, ">f8"))

    class Gradients(Tensor):
        def __dlpack__(self, **_):
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    with pytest.raises(BlockMismatchError, match=r"require gradient.* Return such an array"):
        LibraryFunction(lambda a: Gradients(a.values), "torch")(np.zeros(3))


def test_an_array_on_a_gpu_is_refused_without_cupy(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    function = LibraryFunction(lambda a: Tensor(a.values, (2, 0)), "torch")
    with pytest.raises(BlockMismatchError, match="in host memory from the function"):
        function(np.zeros(3))


def test_jax_gets_contiguous_arrays_of_the_same_dtype(jax):
    function = LibraryFunction(lambda a: a, "jax")
    strided = np.arange(8.0)[::2]
    assert function(strided).tolist() == [0, 2, 4, 6]
    assert function(np.float64(3)) == 3
    assert function(np.array(3.0)).shape == ()
    jax.dlpack.from_dlpack = lambda array: jax.Array(np.from_dlpack(array).astype("f4"))
    with pytest.raises(InputError, match=r"arrays of float64, got one.*jax_enable_x64"):
        function(strided)


def test_results_of_jax_are_waited_for(jax):
    results = []
    LibraryFunction(lambda a: results.append(a) or a, "jax")(np.zeros(2))
    assert results[0].was_ready


def test_unknown_and_missing_libraries(monkeypatch):
    assert dlpack.checked_library(None) is None
    assert dlpack.wrap_in_library(len, None) is len
    with pytest.raises(InputError, match=r"expected one of torch, jax, or None.* got 'numpy'"):
        dlpack.checked_library("numpy")
    dlpack._load_library.cache_clear()
    for name in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingPackageError, match=f"pip install {name}") as caught:
            LibraryFunction(len, name)([])
        assert caught.value.name == name


def test_functions_are_pickled_and_named():
    function = LibraryFunction(np.sin, "torch")
    again = pickle.loads(pickle.dumps(function))
    assert (again.function, again.library) == (np.sin, "torch")
    assert again.__name__ == "sin"
    assert dlpack.copy_for_thread(len) is len
    assert dlpack.copy_for_thread(function)._returned is not function._returned


# --- GPUs


@pytest.fixture
def cupy(monkeypatch):
    """CuPy with one current stream, which records events."""
    module, events = ModuleType("cupy"), []

    def record():
        events.append(SimpleNamespace(done=False))
        return events[-1]

    stream = SimpleNamespace(ptr=0, record=record)
    runtime = SimpleNamespace(getDevice=lambda: 1)
    module.cuda = SimpleNamespace(get_current_stream=lambda: stream, runtime=runtime)
    module.ndarray, module.from_dlpack = type("ndarray", (), {}), lambda a: a.values
    module.stream, module.events = stream, events
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_torch_has_the_current_stream(torch, cupy):
    calls = []

    @contextmanager
    def current(stream):
        calls.append(stream)
        yield
        calls.append(None)

    torch.cuda.is_available = lambda: True
    torch.cuda.ExternalStream = lambda pointer, device: (pointer, device)
    torch.cuda.stream = current
    function = LibraryFunction(lambda: calls.append("the function"), "torch")
    function()
    assert calls == ["the function"]  # the default stream is that of both
    cupy.stream.ptr = 99
    function()
    assert calls[1:] == [(99, 1), "the function", None]


def test_arrays_of_jax_live_until_the_stream_has_read_them(jax, cupy):
    function = LibraryFunction(lambda: jax.Array(np.zeros(2), device=(2, 0)), "jax")
    returned = function._returned
    function()
    assert len(returned._new) == 1
    assert not cupy.events  # readers of the result may follow
    function()
    assert len(returned._read) == 1
    assert len(cupy.events) == 1
    cupy.events[0].done = True
    function()
    assert [event for event, _ in returned._read] == cupy.events[1:]
    assert not copy.copy(function)._returned._read


def test_few_results_are_kept():
    results, pieces, computed = IdentityCache(max_size=2), [], []
    for key in (0, 1, 2, 0, 1, 2):
        results.get(pieces, key, lambda key=key: computed.append(key) or key)
    assert computed == [0, 1, 2, 0, 1, 2]


def test_a_result_of_two_threads_counts_once():
    results, pieces, barrier = IdentityCache(max_size=2), [], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(results.get, pieces, "a", lambda: barrier.wait(BOUND_S))
    first = results.get(pieces, "a", object)
    results.get(pieces, "b", object)
    assert results.get(pieces, "a", object) is first
