"""What is asked of a GPU, with a driver that only says what the test wants."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from dask_p2p.errors import DeviceLostError, TransferError
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
