"""Synchronisation with a GPU, and detection of a lost one.

Users' tasks may write a block on any stream of any library, and may capture CUDA graphs while other
threads of the worker serve peers. All code of this package therefore follows these rules:

- It reads a block only after `wait_until_written`.
- Its threads use the device in `device_work`. There nearly all calls are safe while another thread
  captures a graph. Two calls would still break the capture: `cudaDeviceSynchronize`, and any use of
  the null stream while a blocking stream is captured.
- Its own memory comes from `private_stream`, and is idle before it is freed. Users' streams
  therefore never have pending work on this memory.

Functions import CuPy; the import of this module does not. Functions without a device argument use
the calling thread's current device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from dask_p2p.errors import DeviceLostError, TransferError, install_command
from dask_p2p.types import Array

_SMALL_BYTES = 512
_LONGEST_CAPTURE_S = 60.0
_POLL_S = 1e-3
_STREAM_CAPTURE_IMPLICIT = 906  # CUDA's error code: a blocking stream is being captured
# CUDA errors that make the GPU unusable in this process: a kernel accessed invalid memory, failed
# an assertion or ran too long, or the hardware failed.
_STICKY = frozenset({214, 219, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 999})

_private: dict[tuple[int, str], Any] = {}  # streams, by device and use
_written: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id, as arrays have no hash


def current_device() -> int | None:
    """Return the number of this thread's GPU; None without one, or if CuPy is not loaded."""
    if "cupy" not in sys.modules:
        return None
    import cupy

    try:
        return int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


def gpu_obstacle() -> str | None:
    """Return the reason why this process cannot use a GPU; None if it can."""
    try:
        import cupy
    except ImportError as exc:
        return f"CuPy cannot be imported ({exc}; {install_command('cuda13')})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        return f"CUDA finds no GPU ({exc})"
    return None if count else "no GPU is visible"


# --- streams ---


def private_stream(use: str = "memory") -> Any:
    """Return a stream of this package, by default the one for allocations of its own memory.

    All threads of a process share it, because a pool keeps memory for each stream that has ever
    allocated. The stream for memory gets no other work. Synchronise it before the first use of its
    memory, since a pool may make it wait for the memory's previous owner.
    """
    import cupy

    key = cupy.cuda.runtime.getDevice(), use
    if key not in _private:  # another thread may make it concurrently
        _private.setdefault(key, cupy.cuda.Stream(non_blocking=True))
    return _private[key]


def order_after_null_stream(streams: Sequence[Any]) -> None:
    """Make streams wait, on the device, for the present work of the null stream."""
    import cupy

    wait_for_null_stream()
    event = cupy.cuda.Stream.null.record()
    for stream in streams:
        stream.wait_event(event)


def wait_for_null_stream() -> None:
    """Wait until the null stream is usable, which it is not while a blocking stream is captured.

    `TransferError` after a long wait.
    """
    import cupy

    runtime = cupy.cuda.runtime
    deadline_s = time.monotonic() + _LONGEST_CAPTURE_S
    while True:
        try:
            runtime.streamIsCapturing(0)  # safe, unlike a use of the stream
        except runtime.CUDARuntimeError as exc:
            if exc.status != _STREAM_CAPTURE_IMPLICIT:
                raise
        else:
            return
        if time.monotonic() > deadline_s:
            raise TransferError(
                f"another task has been capturing a CUDA graph on a blocking stream for "
                f"{_LONGEST_CAPTURE_S:g} s, which blocks the null stream for all threads. Capture "
                f"on a non-blocking stream, or use one thread a worker."
            )
        time.sleep(_POLL_S)


def wait_for_all_streams() -> None:
    """Wait until the device has finished all work of this process, on any stream.

    `cudaDeviceSynchronize` would invalidate every graph that is being captured in the process.
    `cudaMalloc` and `cudaFree` do not, but also "synchronize across all executing CUDA streams"
    (CUDA C++ Programming Guide, "Stream Ordered Memory Allocator"). On an idle device this takes
    3 µs, or 0.7 ms if the driver maps a new page for it. Call it within `device_work`.
    """
    import cupy

    runtime = cupy.cuda.runtime
    try:
        _keep_page(runtime.getDevice())
        address = runtime.malloc(_SMALL_BYTES)
    except runtime.CUDARuntimeError:  # out of memory, or lost; then the next call raises too
        runtime.deviceSynchronize()
    else:
        runtime.free(address)


@cache
def _keep_page(device: int) -> int:
    """Keep a small allocation for ever, so that the next one fits into the same mapped page."""
    import cupy

    return int(cupy.cuda.runtime.malloc(_SMALL_BYTES))


# --- blocks of users ---


def wait_until_written(blocks: Iterable[Any], *, any_stream: bool = True) -> None:
    """Wait until the producers' queued work on these CuPy arrays is finished.

    A task returns before its kernels end. The wait happens once for each block. Blocks may be on
    any GPU of this process. With `any_stream` they may have been written on any stream; otherwise
    only on the null stream, or on streams that the null stream waits for.
    """
    new = [block for block in blocks if _written.get(id(block)) is not block]
    if not new:
        return
    import cupy

    for device in {block.device.id for block in new}:
        with cupy.cuda.Device(device):
            if any_stream:
                wait_for_all_streams()
            else:
                stream = private_stream()
                order_after_null_stream([stream])
                stream.synchronize()
    for block in new:
        mark_written(block)


def mark_written(block: Array) -> None:
    """Record that a block needs no wait."""
    _written[id(block)] = block


# --- failures ---


@contextmanager
def device_work() -> Iterator[None]:
    """Return a context for all device work of a thread of this package.

    The work is safe while another thread captures a CUDA graph. If the device is lost, the context
    raises `DeviceLostError` instead of the resulting error.
    """
    before = relax_capture()
    try:
        yield
    except Exception:
        raise_if_lost()
        raise
    finally:
        if before is not None:
            _exchange_capture_mode(before)


def relax_capture() -> Any:
    """Let this thread use the device while another one captures a CUDA graph.

    Return the previous mode.
    """
    if "cupy" not in sys.modules or driver() is None:
        return None
    return _exchange_capture_mode(driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def _exchange_capture_mode(mode: Any) -> Any:
    error, before = driver().cuThreadExchangeStreamCaptureMode(mode)
    return before if error == driver().CUresult.CUDA_SUCCESS else None


def raise_if_lost() -> None:
    """Raise `DeviceLostError` if this process's CUDA context is lost.

    After a loss every CUDA call fails, until the process ends.
    """
    if "cupy" not in sys.modules:
        return
    import cupy

    error = None
    try:
        cupy.cuda.runtime.memGetInfo()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        error = str(exc) if exc.status in _STICKY else None
    except Exception:  # no driver, no device
        return
    if error is not None:
        raise DeviceLostError(
            f"the CUDA context of this process is lost: {error}. A kernel of an earlier task "
            f"or the hardware failed. Restart the process."
        )


# Information from the CUDA driver about GPUs and memory.
#
# Functions import CUDA's packages; the import of this module does not.

MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the driver derives the direction from the addresses


@cache
def driver() -> Any:
    """Return cuda-bindings' driver API; None if it or the driver is not installed."""
    try:
        from cuda.bindings import driver as api

        api.cuDriverGetVersion()
    except Exception:  # each missing component has its own error class
        return None
    return api


@cache
def uuid(device: int) -> bytes:
    """Return the UUID of a GPU, 16 bytes; empty if it is unknown.

    CuPy truncates a UUID at its first zero byte, which one UUID in sixteen has.
    """
    with suppress(Exception):  # not installed, or one of the driver's many errors
        from cuda.bindings import driver as api

        error, number = api.cuDeviceGet(device)
        if error == api.CUresult.CUDA_SUCCESS:
            # In CUDA 12 only the second version returns the UUIDs of MIG instances.
            get_uuid = getattr(api, "cuDeviceGetUuid_v2", None) or api.cuDeviceGetUuid
            error, result = get_uuid(number)
            if error == api.CUresult.CUDA_SUCCESS:
                return bytes(result.bytes)
    return b""


def is_shareable(address: int) -> bool:
    """Return false if CUDA IPC is known to be unable to share memory with other processes.

    It cannot share managed memory, or memory of `cudaMallocAsync`.
    """
    with suppress(TransferError):
        return bool(_attribute(driver(), "IS_LEGACY_CUDA_IPC_CAPABLE", address))
    return True


def is_managed(address: int) -> bool:
    """Return true if memory is managed: its pages move to the processor that touches them."""
    with suppress(TransferError):
        return bool(_attribute(driver(), "IS_MANAGED", address))
    return False


def buffer_id(address: int) -> int:
    """Return the id, unique in this process, of the allocation that memory belongs to.

    Raises `ImportError` without cuda-bindings, and `TransferError` if the driver does not report
    the id.
    """
    from cuda.bindings import driver as api

    return int(_attribute(api, "BUFFER_ID", address))


def allocation(address: int) -> tuple[int, int]:
    """Return the address and the size in bytes of the allocation that memory belongs to.

    Raises the errors of `buffer_id`.
    """
    from cuda.bindings import driver as api

    start, size = "RANGE_START_ADDR", "RANGE_SIZE"
    return int(_attribute(api, start, address)), int(_attribute(api, size, address))


def close_ipc(address: int) -> None:
    """Close a mapping of another process's memory, made by `cudaIpcOpenMemHandle`.

    The driver may wait for all work on the device, which may wait for another thread of this
    process. CuPy's function would hold the interpreter lock, and block that thread.
    """
    import cupy

    runtime, api = cupy.cuda.runtime, driver()
    if api is not None:
        runtime.memGetInfo()  # sets the device's context in a thread that is new to it
        (error,) = api.cuIpcCloseMemHandle(address)
        if error == api.CUresult.CUDA_SUCCESS:
            return
    runtime.ipcCloseMemHandle(address)


def _attribute(api: Any, name: str, address: int) -> Any:
    """Return an attribute of memory; `TransferError` if the driver does not report it."""
    if api is None:
        raise TransferError(f"cuda-bindings is needed for {name}; {install_command('cuda13')}")
    attribute = getattr(api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    error, value = api.cuPointerGetAttribute(attribute, address)
    if error != api.CUresult.CUDA_SUCCESS:
        raise TransferError(f"the CUDA driver does not report {attribute.name}: {error.name}")
    return value


#: Most pairs of events of a queue at a time. To make and read one takes the host 10 µs.
MOST_PAIRS = 64


@dataclass(slots=True)
class Timer:
    """The sum of the times of groups of work; as a context, it adds the context's time."""

    groups: int = 0  # number of groups of work
    timed: int = 0  # number of timed groups
    timed_s: float = 0.0
    clock: Callable[[], float] = perf_counter
    _start_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.timed_s * self.groups / self.timed if self.timed else 0.0

    def add(self, time_s: float) -> None:
        self.timed += 1
        self.timed_s += time_s

    def __enter__(self) -> None:
        self._start_s = self.clock()

    def __exit__(self, *exc: object) -> None:
        self.groups += 1
        self.add(self.clock() - self._start_s)


class _TimedEvents(NamedTuple):
    """Events before and after a group's work on one stream."""

    timer: Timer
    stream: Any
    start: Any
    stop: Any


class StreamTimings:
    """Times of work on streams, measured without waiting.

    It times the first, the eighth, the 64th group of a timer and so on; timing all groups would
    delay an exchange too long. `event` returns a new event with timing. `elapsed_ms` returns the
    time between two events that have happened.
    """

    def __init__(self, event: Callable[[], Any], elapsed_ms: Callable[[Any, Any], float]) -> None:
        self._event, self._elapsed_ms = event, elapsed_ms
        self._pairs: list[_TimedEvents] = []
        self._timer: Timer | None = None  # timer of the present group, if it is timed
        self._pair: _TimedEvents | None = None  # events of that group
        self.has_begun = False  # true with work since the last `read`

    @contextmanager
    def group(self, timer: Timer) -> Iterator[None]:
        number = timer.groups + 1
        is_power_of_8 = number & (number - 1) == 0 and number.bit_length() % 3 == 1
        if is_power_of_8 and len(self._pairs) < MOST_PAIRS:
            self._timer = timer
        try:
            yield
            timer.groups = number
            if self._pair is not None:
                self._pair.stop.record(self._pair.stream)
                self._pairs.append(self._pair)
        finally:
            self._timer = self._pair = None

    def begin(self, stream: Any) -> None:
        self.has_begun = True
        if self._timer is not None and self._pair is None:
            self._pair = _TimedEvents(self._timer, stream, self._event(), self._event())
            self._pair.start.record(stream)

    def read(self) -> None:
        """Add all times to their timers. Call it after the streams are synchronised."""
        for timer, _, start, stop in self._pairs:
            timer.add(self._elapsed_ms(start, stop) / 1e3)
        self._pairs.clear()
        self.has_begun = False
