import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.kernels import Kernel, as_array, kernel_for, kernel_named


@pytest.mark.parametrize(
    "block", [np.zeros(3), np.zeros(()), np.float64(1), np.zeros((2, 0)), np.zeros(2, "O")], ids=str
)
def test_arrays_of_numpy_get_the_numpy_kernel(block):
    assert kernel_for(block) is kernel_named("numpy")
    assert kernel_for(block).name == "numpy"
    assert isinstance(kernel_for(block), Kernel)


def test_scalars_become_arrays():
    array = as_array(np.float32(3))
    assert (type(array), array.dtype, array.shape) == (np.ndarray, np.dtype("f4"), ())
    record = as_array(np.zeros((), [("a", "i1"), ("b", "f8")])[()])
    assert (record.dtype.names, record.shape) == (("a", "b"), ())
    block = np.ones(3)
    assert as_array(block) is block


def test_memory_maps_are_plain_arrays(tmp_path):
    block = np.memmap(tmp_path / "block", "f4", "w+", shape=(3, 4))
    assert kernel_for(block).name == "numpy"


@pytest.mark.parametrize(
    ("block", "came"),
    [
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (np.ones((2, 2)).view(np.matrix), "matrix"),
        ([1, 2], "builtins.list"),
        (memoryview(b"12"), "memoryview"),
    ],
)
def test_others_are_refused_by_name(block, came):
    with pytest.raises(UnsupportedArrayError, match=rf"(?s)Expected .*got .*{came}.*Convert|Fill"):
        kernel_for(block)


def test_an_array_of_another_package_is_refused():
    foreign = type("Foreign", (), {"__module__": "foreign.core"})
    with pytest.raises(UnsupportedArrayError, match=r"foreign\.core\.Foreign.*np\.asarray"):
        kernel_for(foreign())


@pytest.mark.parametrize("method", ["todense", "toarray"])
def test_sparse_blocks_are_told_how_to_become_dense(method):
    sparse = type("COO", (), {"__module__": "sparse.core", method: lambda block: np.ones(2)})
    with pytest.raises(UnsupportedArrayError, match=r"sparse\.core\.COO") as caught:
        kernel_for(sparse())
    assert f"map_blocks(lambda block: block.{method}())" in str(caught.value)


def test_unknown_names_are_refused():
    with pytest.raises(UnsupportedArrayError, match="Expected one of the kernels numpy, cupy"):
        kernel_named("torch")


def test_a_missing_cupy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "dask_p2p.kernels.cupy", raising=False)
    with pytest.raises(UnsupportedArrayError, match="importable CuPy"):
        kernel_named("cupy")


def test_a_block_of_cupy_gets_the_cupy_kernel(monkeypatch):
    fake = ModuleType("dask_p2p.kernels.cupy")
    checked = []
    fake.KERNEL = type("Fake", (), {"name": "cupy", "check": lambda self, b: checked.append(b)})()
    monkeypatch.setitem(sys.modules, "dask_p2p.kernels.cupy", fake)
    block = type("ndarray", (), {"__module__": "cupy"})()
    assert kernel_for(block) is fake.KERNEL
    assert checked == [block]


def test_numpy_blocks_do_not_need_cupy():
    """CuPy itself may be there: Dask imports it where it is installed."""
    code = (
        "import sys, numpy; from dask_p2p.kernels import kernel_for;"
        "kernel_for(numpy.zeros(3)); assert 'dask_p2p.kernels.cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
