"""Devices with a driver that only says what the test wants: memory, errors, timing."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from dask_p2p.backends import device as driver
from dask_p2p.backends.device import StreamTimings, Timer
from dask_p2p.errors import DeviceLostError, TransferError
from tests.backends.support import cupy
from tests.support import loaded_anew


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
    return runtime


@pytest.fixture
def device():
    """The module, as before the first use of a GPU."""
    return loaded_anew("dask_p2p.backends.device")


def test_a_block_is_waited_for_once(runtime, device):
    first, second = Block(), Block()
    device.wait_until_written([first])
    assert runtime.calls == ["getDevice", "malloc", "malloc", "free"]  # one is kept
    device.wait_until_written([first, second])
    device.wait_until_written([first, second])
    assert runtime.calls[4:] == ["getDevice", "malloc", "free"]
    device.wait_until_written([])


def test_blocks_of_default_streams_need_the_null_stream_only(runtime, device):
    device.wait_until_written([Block()], any_stream=False)
    assert "malloc" not in runtime.calls
    assert runtime.calls[-3:] == ["record null", "wait event", "synchronize"]


def test_without_memory_the_whole_device_is_waited_for(runtime, device):
    runtime.status["malloc"] = 2
    device.wait_for_all_streams()
    assert runtime.calls == ["getDevice", "malloc", "deviceSynchronize"]
    runtime.status.clear()
    device.wait_for_all_streams()
    assert runtime.calls[3:] == ["getDevice", "malloc", "malloc", "free"]


def test_the_null_stream_is_left_alone_while_a_blocking_stream_is_captured(
    runtime, device, monkeypatch
):
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


def test_a_capture_that_does_not_end_is_named(runtime, device, monkeypatch):
    now_s = iter(range(0, 1000, 30))
    clock = SimpleNamespace(monotonic=lambda: next(now_s), sleep=lambda seconds: None)
    monkeypatch.setattr(device, "time", clock)
    runtime.status["streamIsCapturing"] = 906
    with pytest.raises(TransferError, match="capturing a CUDA graph"):
        device.wait_for_null_stream()


@pytest.mark.parametrize("status", [700, 710, 719, 214])
def test_whatever_fails_on_a_lost_device_the_loss_is_named(runtime, device, status):
    runtime.status["memGetInfo"] = status
    with (
        pytest.raises(DeviceLostError, match=f"error {status}.*Restart the process"),
        device.device_work(),
    ):
        raise RuntimeError("RMM: cudaErrorIllegalAddress")


@pytest.mark.parametrize("status", [0, 2, 900])
def test_other_errors_are_what_they_are(runtime, device, status):
    runtime.status["memGetInfo"] = status
    with pytest.raises(ValueError, match="mine"), device.device_work():
        raise ValueError("mine")
    device.raise_if_lost()


def test_a_process_without_a_gpu_says_why(runtime, device, monkeypatch):
    assert device.gpu_obstacle() == "no GPU is visible"
    monkeypatch.setattr(Runtime, "getDeviceCount", lambda self: 2, raising=False)
    assert device.gpu_obstacle() is None
    monkeypatch.delattr(Runtime, "getDeviceCount")
    runtime.status["getDeviceCount"] = 100
    assert device.gpu_obstacle() == "CUDA finds no GPU (error 100)"
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert device.gpu_obstacle().startswith("CuPy cannot be imported (import of cupy halted")


UUID = bytes.fromhex("00a1000203040506070809000b0c0d0e")
SHARED_UUID = b"the whole GPU's."  # of all its MIG instances


@pytest.mark.parametrize(
    "uuids",
    [
        pytest.param({"cuDeviceGetUuid": UUID}, id="CUDA 13"),
        pytest.param({"cuDeviceGetUuid": SHARED_UUID, "cuDeviceGetUuid_v2": UUID}, id="CUDA 12"),
    ],
)
def test_uuids_are_whole_though_they_have_zero_bytes(monkeypatch, uuids):
    """CuPy's own would be empty here."""
    success = SimpleNamespace(CUDA_SUCCESS=0)
    functions = {
        name: lambda number, uuid=uuid: (0, SimpleNamespace(bytes=uuid))
        for name, uuid in uuids.items()
    }
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(
        CUresult=success, cuDeviceGet=lambda number: (0, number), **functions
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    assert driver.uuid.__wrapped__(0) == UUID


def test_without_bindings_there_is_no_uuid(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert driver.uuid.__wrapped__(0) == b""


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


NAMES = ["IS_LEGACY_CUDA_IPC_CAPABLE", "IS_MANAGED", "RANGE_START_ADDR", "RANGE_SIZE", "BUFFER_ID"]
ATTRIBUTES = [SimpleNamespace(name=f"CU_POINTER_ATTRIBUTE_{name}") for name in NAMES]


class Driver:
    """Of CUDA: attributes of memory by name; what is asked about others fails."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUpointer_attribute = SimpleNamespace(**{item.name: item for item in ATTRIBUTES})

    def __init__(self, **functions):
        self.known = {f"CU_POINTER_ATTRIBUTE_{name}": value for name, value in functions.items()}

    def cuPointerGetAttribute(self, attribute, address):  # noqa: N802
        assert address == 0x1000
        if attribute.name in self.known:
            return 0, self.known[attribute.name]
        return SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"), None


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
    import pynvml

    pynvml.nvmlInit()
    bus_id = cupy.cuda.runtime.deviceGetPCIBusId(0)
    named = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByPciBusId(bus_id))
    assert driver.uuid(0).hex() == named.removeprefix("GPU-").replace("-", "")


class Event:
    """Happens when the work of its stream so far ends."""

    def record(self, stream):
        self.at_ms = stream.at_ms


def test_of_many_groups_few_are_timed():
    make_event = mock.Mock(side_effect=Event)
    timings = StreamTimings(make_event, lambda start, stop: stop.at_ms - start.at_ms)
    stream, timer = SimpleNamespace(at_ms=0.0), Timer()
    for number in range(1, 101):
        with timings.group(timer):
            timings.begin(stream)
            stream.at_ms += 1000 if number < 64 else 7000
    timings.read()
    assert (timer.groups, timer.timed, make_event.call_count) == (100, 3, 2 * 3)  # 1, 8, 64
    assert timer.seconds == pytest.approx(100 * (2 + 7) / 3)
