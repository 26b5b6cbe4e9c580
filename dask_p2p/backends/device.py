"""What the package asks of a GPU besides kernels: what to wait for, and does it still work.

Users' tasks may write a block on any stream of any library, and may capture CUDA graphs while other
threads of the worker serve peers. So these rules hold for all of this package's code:

- A block is read only after `wait_until_written`.
- Threads of the package work in `device_work`. There nearly everything is allowed while another
  thread captures a graph. Only `cudaDeviceSynchronize`, and the null stream while a blocking stream
  is captured, would still break that capture.
- Memory of the package's own comes from `private_stream`, and is idle before it goes back. So no
  stream of a user ever has work left on it.

CuPy is imported when a function is called, never with this module. Functions that take no device
speak of the calling thread's current one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

from dask_p2p.backends.driver import driver
from dask_p2p.errors import DeviceLostError, TransferError
from dask_p2p.types import Array

_SMALL_BYTES = 512
_LONGEST_CAPTURE_S = 60.0
_POLL_S = 1e-3
_STREAM_CAPTURE_IMPLICIT = 906  # of CUDA: a blocking stream is captured
# CUDA errors after which nothing on the GPU works in this process: a kernel accessed invalid
# memory, failed an assertion or ran too long, or the hardware failed.
_STICKY = frozenset({214, 219, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 999})

_private: dict[tuple[int, str], Any] = {}  # streams, by device and use
_written: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id: arrays have no hash


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
    """Return why this process has no GPU to compute on; None if it has one."""
    try:
        import cupy
    except ImportError as exc:
        return f"CuPy cannot be imported ({exc})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        return f"CUDA finds no GPU ({exc})"
    return None if count else "no GPU is visible"


# --- streams ---


def private_stream(use: str = "memory") -> Any:
    """Return a stream of this package, by default that on which its own memory is allocated.

    It is one for all threads of a process, as a pool keeps memory for each stream that it ever
    gave some to. Nothing is queued on that for memory. Wait for it before the first use of memory
    from it, since a pool may have made it wait for the memory's last owner.
    """
    import cupy

    key = cupy.cuda.runtime.getDevice(), use
    if key not in _private:  # or another thread makes it just now
        _private.setdefault(key, cupy.cuda.Stream(non_blocking=True))
    return _private[key]


def order_after_null_stream(streams: Sequence[Any]) -> None:
    """Have streams wait, on the device, for what the null stream has been given so far."""
    import cupy

    wait_for_null_stream()
    event = cupy.cuda.Stream.null.record()
    for stream in streams:
        stream.wait_event(event)


def wait_for_null_stream() -> None:
    """Wait until the null stream may be used: while a blocking stream is captured, it may not.

    `TransferError` if that goes on for long.
    """
    import cupy

    runtime = cupy.cuda.runtime
    deadline_s = time.monotonic() + _LONGEST_CAPTURE_S
    while True:
        try:
            runtime.streamIsCapturing(0)  # which harms no capture, where using the stream would
        except runtime.CUDARuntimeError as exc:
            if exc.status != _STREAM_CAPTURE_IMPLICIT:
                raise
        else:
            return
        if time.monotonic() > deadline_s:
            raise TransferError(
                f"another task has been capturing a CUDA graph on a blocking stream for "
                f"{_LONGEST_CAPTURE_S:g} s, in which nobody else can use the null stream. Capture "
                f"on a non-blocking stream, or with one thread a worker."
            )
        time.sleep(_POLL_S)


def wait_for_all_streams() -> None:
    """Wait until the device has done all work of this process, on any stream.

    `cudaDeviceSynchronize` would invalidate every graph that is being captured in the process.
    `cudaMalloc` and `cudaFree` do not, and "synchronize across all executing CUDA streams" as well
    (CUDA C++ Programming Guide, "Stream Ordered Memory Allocator"): 3 µs where there is nothing to
    wait for, and 0.7 ms if the driver has to map a new page for it. Expects `device_work`.
    """
    import cupy

    runtime = cupy.cuda.runtime
    try:
        _keep_page(runtime.getDevice())
        address = runtime.malloc(_SMALL_BYTES)
    except runtime.CUDARuntimeError:  # out of memory, or lost, which the next call says too
        runtime.deviceSynchronize()
    else:
        runtime.free(address)


@cache
def _keep_page(device: int) -> int:
    """Keep a little memory of a GPU for ever: the same page has room for a little more."""
    import cupy

    return int(cupy.cuda.runtime.malloc(_SMALL_BYTES))


# --- blocks of users ---


def wait_until_written(blocks: Iterable[Any], *, any_stream: bool = True) -> None:
    """Wait until what their producers have queued for these CuPy arrays is done.

    A task returns before its kernels are done. Each block is waited for once in its life. They may
    be on any GPUs of this process, and written on any stream; else only on the null stream, or on
    streams that the null stream waits for.
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
    """Note that a block need not be waited for."""
    _written[id(block)] = block


# --- what may go wrong ---


@contextmanager
def device_work() -> Iterator[None]:
    """Return a context for everything that a thread of the package does with a device.

    It may go on while another thread captures a CUDA graph, and it finds out if the device is lost:
    `DeviceLostError` in place of whatever error that has led to.
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

    Return what was set before.
    """
    if "cupy" not in sys.modules or driver() is None:
        return None
    return _exchange_capture_mode(driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def _exchange_capture_mode(mode: Any) -> Any:
    error, before = driver().cuThreadExchangeStreamCaptureMode(mode)
    return before if error == driver().CUresult.CUDA_SUCCESS else None


def raise_if_lost() -> None:
    """Raise `DeviceLostError` if this process' CUDA context is lost.

    The next call of CUDA finds the error, and so does every later one. Only the end of the process
    helps.
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
            f"the GPU of this process works no more: {error}. A kernel of an earlier task "
            f"failed, or the hardware did. Only a new process helps."
        )
