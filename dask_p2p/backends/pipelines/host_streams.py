"""Transfers between host memory and a GPU: three streams, and memory for parts on both sides.

A new object imports CuPy; the import of this module does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from dask_p2p.backends.driver import MEMCPY_DEFAULT
from dask_p2p.backends.host.pinned import CANNOT_PIN, Pinned
from dask_p2p.backends.kernels.pitch import Pitch, engine_pitch
from dask_p2p.backends.pipelines.slots import KeptSlots, Slot
from dask_p2p.backends.timing import StreamTimings
from dask_p2p.types import Array


class HostStreams:
    """Three streams of the current GPU, and memory for parts that is kept for reuse.

    All blocks of a process go through the same streams. A block can start while the last parts of
    another one are in transit, without delaying them. If memory cannot be pinned, copies are
    slower, and the object calls `warn` with the problem and its cause.
    """

    _streams: ClassVar[dict[int, dict[str, Any]]] = {}  # by device
    _kept_slots = KeptSlots()
    _kept_host_slots = KeptSlots()

    def __init__(self, warn: Callable[..., None]) -> None:
        import cupy

        self.cupy = cupy
        self._device = device = cupy.cuda.runtime.getDevice()
        if device not in self._streams:
            made = {action: cupy.cuda.Stream(non_blocking=True) for action in ("up", "run", "down")}
            self._streams.setdefault(device, made)  # another thread may do this concurrently
        self.streams = self._streams[device]
        self.timings = StreamTimings(cupy.cuda.Event, cupy.cuda.get_elapsed_time)
        self._warn = warn

    def device_slots(self, count: int, size_bytes: int) -> list[Slot]:
        """Return device memory for `count` parts."""
        if kept := self._kept_slots.take(self._device, size_bytes, count):
            return kept
        with self.streams["up"]:  # the stream that fills it, which therefore does not wait
            return _slots(self.cupy.empty((count * size_bytes,), np.uint8), count)

    def host_slots(self, count: int, size_bytes: int) -> list[Slot]:
        """Return host memory for `count` parts, pinned if possible."""
        if kept := self._kept_host_slots.take(None, size_bytes, count):
            return kept
        try:
            return _slots(np.asarray(Pinned(count * size_bytes)), count)
        except (OSError, MemoryError, self.cupy.cuda.runtime.CUDARuntimeError) as exc:
            self._warn(CANNOT_PIN, f"{type(exc).__name__}: {exc}")
            return _slots(np.empty(count * size_bytes, np.uint8), count)

    @classmethod
    def drop_slots(cls) -> None:
        """Free the device memory that is kept for the next block."""
        cls._kept_slots.clear()

    def keep(self, slots: list[Slot], host_slots: list[Slot]) -> None:
        """Keep memory for a while for the next block, which waits until it is free."""
        for kept, device, each in (
            (self._kept_slots, self._device, slots),
            (self._kept_host_slots, None, host_slots),
        ):
            if each:
                kept.keep(device, each)

    def copy_up(self, to: Array, of: np.ndarray[Any, Any], pitch: Pitch | None = None) -> None:
        """Queue a copy of a host array with this pitch to device memory; None: it is contiguous."""
        ptr, pitch = to.data.ptr, pitch or _contiguous(of)
        self._copy(ptr, pitch.run_bytes, of.ctypes.data, pitch.stride_bytes, pitch, "up")

    def copy_down(self, to: np.ndarray[Any, Any], of: Array, pitch: Pitch | None = None) -> None:
        """Queue a copy of device memory to a host array with this pitch; None: contiguous."""
        ptr, pitch = of.data.ptr, pitch or _contiguous(to)
        self._copy(to.ctypes.data, pitch.stride_bytes, ptr, pitch.run_bytes, pitch, "down")

    def _copy(
        self, to: int, to_stride: int, of: int, of_stride: int, pitch: Pitch, action: str
    ) -> None:
        runtime, stream = self.cupy.cuda.runtime, self.streams[action].ptr
        size_bytes, rows = pitch.run_bytes, pitch.rows
        if rows > 1:
            runtime.memcpy2DAsync(
                to, to_stride, of, of_stride, size_bytes, rows, MEMCPY_DEFAULT, stream
            )
        elif size_bytes:
            runtime.memcpyAsync(to, of, size_bytes, MEMCPY_DEFAULT, stream)

    def synchronize(self) -> None:
        """Wait for all three streams; afterwards no copy uses the blocks' memory."""
        for stream in self.streams.values():
            stream.synchronize()


def _slots(memory: Any, count: int) -> list[Slot]:
    size_bytes = memory.nbytes // count
    return [Slot(memory[at * size_bytes :][:size_bytes], None, None) for at in range(count)]


def pitch_of(view: np.ndarray[Any, Any]) -> Pitch | None:
    """Return the pitch of a view of host memory; None if copy engines cannot copy it."""
    if view.flags.c_contiguous:
        return _contiguous(view)
    return engine_pitch(view.shape, view.strides, view.itemsize)


def _contiguous(view: np.ndarray[Any, Any]) -> Pitch:
    return Pitch(1, view.nbytes, view.nbytes)
