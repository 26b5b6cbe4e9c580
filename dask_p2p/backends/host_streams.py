"""Between host memory and a GPU: three streams of a thread, and memory for parts on both sides.

CuPy is imported when an object is made, never with this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dask_p2p.backends.pinned import CANNOT_PIN, Pinned
from dask_p2p.backends.pitch import Pitch, engine_pitch
from dask_p2p.backends.slots import KeptSlots, Slot
from dask_p2p.backends.timing import StreamTimings
from dask_p2p.types import Array

__all__ = ["HostStreams", "array_in", "pitch_of"]

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the driver sees from the addresses where they are


class HostStreams:
    """Three streams of the calling thread on the current GPU, and memory that is kept for parts.

    Parameters
    ----------
    warn
        Is told what is missing, and why, where memory cannot be pinned: copies are slower then.
    """

    _per_thread = threading.local()  # streams by device
    _kept_slots = KeptSlots()
    _kept_host_slots = KeptSlots()

    def __init__(self, warn: Callable[..., None]) -> None:
        import cupy

        self.cupy = cupy
        self._device = device = cupy.cuda.runtime.getDevice()
        known: dict[Any, Any] = self._per_thread.__dict__
        if device not in known:
            make = cupy.cuda.Stream
            known[device] = {what: make(non_blocking=True) for what in ("up", "run", "down")}
        self.streams: dict[str, Any] = known[device]
        self.timings = StreamTimings(cupy.cuda.Event, cupy.cuda.get_elapsed_time)
        self._warn = warn

    def device_memory(self, size_bytes: int) -> Slot:
        """Return memory of the device for the inputs of some parts."""
        if kept := self._kept_slots.take(self._device, size_bytes):
            return kept[0]
        with self.streams["up"]:  # on the stream that fills it: there is nothing to wait for
            return Slot(self.cupy.empty((size_bytes,), np.uint8), None, None)

    def host_memory(self, size_bytes: int) -> Slot:
        """Return memory of the host for some parts, pinned if it can be."""
        if kept := self._kept_host_slots.take(None, size_bytes):
            return kept[0]
        try:
            return Slot(np.asarray(Pinned(size_bytes)), None, None)
        except (OSError, MemoryError, self.cupy.cuda.runtime.CUDARuntimeError) as exc:
            self._warn(CANNOT_PIN, f"{type(exc).__name__}: {exc}")
            return Slot(np.empty(size_bytes, np.uint8), None, None)

    @classmethod
    def drop_slots(cls) -> None:
        """Give the device's memory back that is kept for the next block."""
        cls._kept_slots.clear()

    def keep(self, memory: Slot, host_memory: Slot | None) -> None:
        """Keep memory a while for the next block. Nothing reads or writes it any more."""
        self._kept_slots.keep(self._device, [memory])
        if host_memory is not None:
            self._kept_host_slots.keep(None, [host_memory])

    def copy_up(self, to: Array, of: np.ndarray[Any, Any], pitch: Pitch) -> None:
        """Have a copy engine copy an array of the host, of this pitch, to memory of the device."""
        ptr = to.data.ptr
        self._copy(ptr, pitch.run_bytes, of.ctypes.data, pitch.stride_bytes, pitch, "up")

    def copy_down(self, to: np.ndarray[Any, Any], of: Array, pitch: Pitch) -> None:
        """Have one copy memory of the device to an array of the host, which has this pitch."""
        ptr = of.data.ptr
        self._copy(to.ctypes.data, pitch.stride_bytes, ptr, pitch.run_bytes, pitch, "down")

    def _copy(
        self, to: int, to_stride: int, of: int, of_stride: int, pitch: Pitch, what: str
    ) -> None:
        runtime, stream = self.cupy.cuda.runtime, self.streams[what].ptr
        size_bytes, rows = pitch.run_bytes, pitch.rows
        if rows > 1:
            runtime.memcpy2DAsync(
                to, to_stride, of, of_stride, size_bytes, rows, _MEMCPY_DEFAULT, stream
            )
        elif size_bytes:
            runtime.memcpyAsync(to, of, size_bytes, _MEMCPY_DEFAULT, stream)

    def synchronize(self) -> None:
        """Wait for all three: nothing reads or writes any more what the thread has used."""
        for stream in self.streams.values():
            stream.synchronize()
        self.timings.read()


def pitch_of(view: np.ndarray[Any, Any]) -> Pitch | None:
    """Return a view of host memory as a copy engine copies it; None if it does not."""
    if view.flags.c_contiguous:
        return Pitch(1, view.nbytes, view.nbytes)
    return engine_pitch(view.shape, view.strides, view.itemsize)


def array_in(memory: np.ndarray[Any, Any], at: int, like: Any) -> np.ndarray[Any, Any]:
    """Return an array of this shape and dtype in memory of the host, from this byte on."""
    array: np.ndarray[Any, Any] = memory[at:][: like.nbytes].view(like.dtype).reshape(like.shape)
    return array
