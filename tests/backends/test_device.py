"""What is asked of a GPU, with a driver that only says what the test wants."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from functools import cache
from types import ModuleType, SimpleNamespace

import pytest

from dask_p2p.backends import device
from dask_p2p.errors import DeviceLostError, TransferError

UUID = bytes.fromhex("00a1000203040506070809000b0c0d0e")


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class Runtime:
    """Of CUDA. Calls are noted; those with a status fail."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self):
        self.calls, self.status = [], {}

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            if self.status.get(name):
                raise CUDARuntimeError(self.status[name])
            return 0

        return call


class Block:
    """Stands for a CuPy array."""

    device = SimpleNamespace(id=0)


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda number: nullcontext(),
        Stream=lambda **options: SimpleNamespace(
            wait_event=lambda event: runtime.calls.append("wait event"),
            synchronize=lambda: runtime.calls.append("synchronize"),
        ),
    )
    cuda.Stream.null = SimpleNamespace(record=lambda: runtime.calls.append("record null"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "_private", {})
    monkeypatch.setattr(device, "_keep_page", cache(device._keep_page.__wrapped__))
    return runtime


def test_a_block_is_waited_for_once(runtime):
    first, second = Block(), Block()
    device.wait_until_written([first])
    assert runtime.calls == ["getDevice", "malloc", "malloc", "free"]  # one is kept
    device.wait_until_written([first, second])
    device.wait_until_written([first, second])
    assert runtime.calls[4:] == ["getDevice", "malloc", "free"]
    device.wait_until_written([])


def test_what_is_marked_need_not_be_waited_for(runtime):
    block = Block()
    device.mark_written(block)
    device.wait_until_written([block])
    assert runtime.calls == []


def test_another_block_in_the_place_of_one_that_is_gone_is_waited_for(runtime):
    known = len(device._written)
    for _ in range(100):  # Python soon gives the same id again
        device.wait_until_written([Block()])
    gc.collect()
    assert runtime.calls.count("free") == 100
    assert len(device._written) == known


def test_blocks_of_default_streams_need_the_null_stream_only(runtime):
    device.wait_until_written([Block()], any_stream=False)
    assert "malloc" not in runtime.calls
    assert runtime.calls[-3:] == ["record null", "wait event", "synchronize"]


def test_without_memory_the_whole_device_is_waited_for(runtime):
    runtime.status["malloc"] = 2
    device.wait_for_all_streams()
    assert runtime.calls == ["getDevice", "malloc", "deviceSynchronize"]
    runtime.status.clear()
    device.wait_for_all_streams()
    assert runtime.calls[3:] == ["getDevice", "malloc", "malloc", "free"]


def test_the_null_stream_is_left_alone_while_a_blocking_stream_is_captured(runtime, monkeypatch):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            runtime.status.clear()

    runtime.status["streamIsCapturing"] = 906
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=pause)
    monkeypatch.setattr(device, "time", clock)
    device.order_after_null_stream([])
    assert len(pauses) == 3
    assert runtime.calls[-1] == "record null"


def test_a_capture_that_does_not_end_is_named(runtime, monkeypatch):
    now_s = iter(range(0, 1000, 30))
    clock = SimpleNamespace(monotonic=lambda: next(now_s), sleep=lambda seconds: None)
    monkeypatch.setattr(device, "time", clock)
    runtime.status["streamIsCapturing"] = 906
    with pytest.raises(TransferError, match="capturing a CUDA graph"):
        device.wait_for_null_stream()


@pytest.mark.parametrize("status", [700, 710, 719, 214])
def test_whatever_fails_on_a_lost_device_the_loss_is_named(runtime, status):
    runtime.status["memGetInfo"] = status
    with (
        pytest.raises(DeviceLostError, match=f"error {status}.*new process"),
        device.device_work(),
    ):
        raise RuntimeError("RMM: cudaErrorIllegalAddress")


@pytest.mark.parametrize("status", [0, 2, 900])
def test_other_errors_are_what_they_are(runtime, status):
    runtime.status["memGetInfo"] = status
    with pytest.raises(ValueError, match="mine"), device.device_work():
        raise ValueError("mine")
    device.raise_if_lost()


def test_uuids_are_whole_though_they_have_zero_bytes(monkeypatch):
    """CuPy's own would be empty here."""
    success = SimpleNamespace(CUDA_SUCCESS=0)
    driver = SimpleNamespace(
        CUresult=success,
        cuDeviceGet=lambda number: (0, number),
        cuDeviceGetUuid=lambda number: (0, SimpleNamespace(bytes=UUID)),
    )
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    device.uuid.cache_clear()
    assert device.uuid(0) == UUID
    device.uuid.cache_clear()


def test_uuids_of_nvml_where_there_are_no_bindings(monkeypatch, runtime):
    nvml = ModuleType("pynvml")
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByPciBusId = lambda bus_id: bus_id
    nvml.nvmlDeviceGetUUID = lambda handle: "GPU-00a10002-0304-0506-0708-09000b0c0d0e"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    device.uuid.cache_clear()
    assert device.uuid(0) == UUID
    device.uuid.cache_clear()


class Driver:
    """Of CUDA: attributes of memory by name; what is asked about others fails."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, **known):
        self.known = {f"CU_POINTER_ATTRIBUTE_{name}": value for name, value in known.items()}

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
    ("driver", "is_shareable", "is_managed"),
    [
        (None, True, False),
        (Driver(), True, False),  # it does not tell
        (Driver(IS_LEGACY_CUDA_IPC_CAPABLE=1, IS_MANAGED=0), True, False),
        (Driver(IS_LEGACY_CUDA_IPC_CAPABLE=0, IS_MANAGED=1), False, True),
    ],
)
def test_memory_is_ordinary_unless_the_driver_says_otherwise(
    monkeypatch, driver, is_shareable, is_managed
):
    monkeypatch.setattr(device, "_driver", lambda: driver)
    assert device.is_shareable(0x1000) is is_shareable
    assert device.is_managed(0x1000) is is_managed


def test_allocations(monkeypatch):
    bindings = ModuleType("cuda.bindings")
    bindings.driver = Driver(RANGE_START_ADDR=0x800, RANGE_SIZE=0x2000, BUFFER_ID=3)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    assert device.allocation(0x1000) == (0x800, 0x2000, 3)
    bindings.driver = Driver(RANGE_START_ADDR=0x800)
    with pytest.raises(
        TransferError, match="does not report CU_POINTER_ATTRIBUTE_RANGE_SIZE: CUDA_"
    ):
        device.allocation(0x1000)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError):
        device.allocation(0x1000)


@pytest.mark.gpu
def test_the_uuid_of_a_gpu_is_nvmls():
    import cupy
    import pynvml

    pynvml.nvmlInit()
    bus_id = cupy.cuda.runtime.deviceGetPCIBusId(0)
    named = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByPciBusId(bus_id))
    assert device.uuid(0).hex() == named.removeprefix("GPU-").replace("-", "")
