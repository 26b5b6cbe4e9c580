"""What the driver tells, with one that only says what the test wants."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from dask_p2p.backends import device as driver
from dask_p2p.errors import TransferError

UUID = bytes.fromhex("00a1000203040506070809000b0c0d0e")


def of_gpu(number):
    """A UUID that MIG instances share, by the function of CUDA 12 that is not of CUDA 13."""
    return 0, SimpleNamespace(bytes=b"the whole GPU's.")


def of_device(number):
    return 0, SimpleNamespace(bytes=UUID)


@pytest.mark.parametrize(
    "functions",
    [
        pytest.param({"cuDeviceGetUuid": of_device}, id="CUDA 13"),
        pytest.param({"cuDeviceGetUuid": of_gpu, "cuDeviceGetUuid_v2": of_device}, id="CUDA 12"),
    ],
)
def test_uuids_are_whole_though_they_have_zero_bytes(monkeypatch, functions):
    """CuPy's own would be empty here."""
    success = SimpleNamespace(CUDA_SUCCESS=0)
    api = SimpleNamespace(CUresult=success, cuDeviceGet=lambda number: (0, number), **functions)
    bindings = ModuleType("cuda.bindings")
    bindings.driver = api
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    driver.uuid.cache_clear()
    assert driver.uuid(0) == UUID
    driver.uuid.cache_clear()


def test_without_bindings_there_is_no_uuid(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    driver.uuid.cache_clear()
    assert driver.uuid(0) == b""
    driver.uuid.cache_clear()


@pytest.mark.parametrize("status", [0, 1, None])
def test_a_mapping_is_closed_without_pythons_lock_if_possible(monkeypatch, status):
    """By the driver's bindings, which release it; by CuPy where these are missing or refuse."""
    closed = []

    def close(address):
        closed.append(("driver", address))
        return (status,)

    runtime = SimpleNamespace(
        memGetInfo=lambda: (0, 0),
        ipcCloseMemHandle=lambda address: closed.append(("CuPy", address)),
    )
    api = SimpleNamespace(CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuIpcCloseMemHandle=close)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(driver, "driver", lambda: None if status is None else api)
    driver.close_ipc(4096)
    by = {0: ["driver"], 1: ["driver", "CuPy"], None: ["CuPy"]}[status]
    assert closed == [(address, 4096) for address in by]


class Driver:
    """Of CUDA: attributes of memory by name; what is asked about others fails."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, **functions):
        self.known = {f"CU_POINTER_ATTRIBUTE_{name}": value for name, value in functions.items()}

    class CUpointer_attribute:  # noqa: N801
        pass

    def cuPointerGetAttribute(self, attribute, address):  # noqa: N802
        assert address == 0x1000
        if attribute.name in self.known:
            return 0, self.known[attribute.name]
        return SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"), None


for name in (
    "IS_LEGACY_CUDA_IPC_CAPABLE",
    "IS_MANAGED",
    "RANGE_START_ADDR",
    "RANGE_SIZE",
    "BUFFER_ID",
):
    attribute = f"CU_POINTER_ATTRIBUTE_{name}"
    setattr(Driver.CUpointer_attribute, attribute, SimpleNamespace(name=attribute))


@pytest.mark.parametrize(
    ("api", "is_shareable", "is_managed"),
    [
        (None, True, False),
        (Driver(), True, False),  # it does not tell
        (Driver(IS_LEGACY_CUDA_IPC_CAPABLE=1, IS_MANAGED=0), True, False),
        (Driver(IS_LEGACY_CUDA_IPC_CAPABLE=0, IS_MANAGED=1), False, True),
    ],
)
def test_memory_is_ordinary_unless_the_driver_says_otherwise(
    monkeypatch, api, is_shareable, is_managed
):
    monkeypatch.setattr(driver, "driver", lambda: api)
    assert driver.is_shareable(0x1000) is is_shareable
    assert driver.is_managed(0x1000) is is_managed


def test_allocations(monkeypatch):
    bindings = ModuleType("cuda.bindings")
    bindings.driver = Driver(RANGE_START_ADDR=0x800, RANGE_SIZE=0x2000, BUFFER_ID=3)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    assert driver.allocation(0x1000) == (0x800, 0x2000)
    assert driver.buffer_id(0x1000) == 3
    bindings.driver = Driver(RANGE_START_ADDR=0x800)
    with pytest.raises(
        TransferError, match="does not report CU_POINTER_ATTRIBUTE_RANGE_SIZE: CUDA_"
    ):
        driver.allocation(0x1000)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError):
        driver.allocation(0x1000)


@pytest.mark.gpu
def test_the_uuid_of_a_gpu_is_nvmls():
    import cupy
    import pynvml

    pynvml.nvmlInit()
    bus_id = cupy.cuda.runtime.deviceGetPCIBusId(0)
    named = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByPciBusId(bus_id))
    assert driver.uuid(0).hex() == named.removeprefix("GPU-").replace("-", "")
