"""Work queues: where kernels run, in order, for one assembled block.

A queue hides what differs between host and device memory from the code that orders the work:
on a CPU everything is done when a call returns, on a GPU when the queue is synchronised.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from dask_p2p.kernels import kernel_named
from dask_p2p.kernels._geometry import reduce_copy

__all__ = [
    "MOST_UNREAD",
    "SLOTS",
    "DeviceQueue",
    "HostQueue",
    "Pitch",
    "Queue",
    "engine_pitch",
    "pitched",
    "queue_for",
]

SLOTS = 3  # one is filled, one is emptied, one waits for either
MOST_UNREAD = 2  # arrays that came from elsewhere, and are kept for kernels that are queued
_ALIGNMENT_BYTES = 256  # of allocations on a GPU
_FIRST = -1  # a stream's priority: lower numbers go first
# A copy engine brings so many shorter runs a second; kernels that read in place are quicker (H200,
# NVLink, runs of 64 bytes: 183 and 228 GB/s, of 16: 46 and 111; of 128: 359 and 358).
_SHORTEST_RUN_BYTES = 128
_LONGEST_STRIDE_BYTES = 2**31 - 1  # CUDA's memPitch
_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the driver sees from the addresses where they are


class Pitch(NamedTuple):
    """Memory as equal runs of bytes at equal distances: what a copy engine copies at once."""

    rows: int
    run_bytes: int
    stride_bytes: int


def pitched(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Pitch | None:
    """Return a strided region as runs in the order of its elements; None if it has no such form.

    >>> pitched((4, 3), (80, 8), 8)
    Pitch(rows=4, run_bytes=24, stride_bytes=80)
    >>> pitched((4, 3), (8, 80), 8) is None
    True
    """
    if 0 in shape:
        return None
    dense = [itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    geometry = reduce_copy(shape, itemsize, strides, dense)
    run_bytes = geometry.word_bytes
    axes = list(geometry.axes)
    if axes and axes[-1].src_stride_bytes == axes[-1].dst_stride_bytes == run_bytes:
        run_bytes *= axes.pop().extent
    if len(axes) > 1 or any(axis.src_stride_bytes < run_bytes for axis in axes):
        return None
    if not axes:
        return Pitch(1, run_bytes, run_bytes)
    return Pitch(axes[0].extent, run_bytes, axes[0].src_stride_bytes)


@lru_cache(maxsize=1024)  # of the parts of a block, most are alike
def engine_pitch(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Pitch | None:
    """Return a region's pitch if a copy engine copies it, and quicker than a kernel; else None."""
    pitch = pitched(shape, strides, itemsize)
    if pitch is None or pitch.stride_bytes > _LONGEST_STRIDE_BYTES:
        return None
    return pitch if pitch.rows == 1 or pitch.run_bytes >= _SHORTEST_RUN_BYTES else None


@dataclass(frozen=True, slots=True)
class _Slot:
    """Local memory for one part of a peer's block."""

    memory: Any
    full: Any  # event: what was copied is there
    free: Any  # event: what was there is not needed any more


class Queue(Protocol):
    """An in-order queue of kernels."""

    kind: str  # of the arrays: "numpy" or "cupy"

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a new C-ordered array of the queue's kind, its values undefined."""

    def permute(self, dst: Any, src: Any, axes: Sequence[int], *, aside: bool = False) -> None:
        """Do ``dst[...] = src.transpose(axes)`` after what was queued before.

        Aside: in no order with the rest, beside it where there is room.
        """

    def permute_and_drop(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        """Do the same with an array of either kind that is nobody else's.

        The caller can let go of it at once: it is kept until it has been read.
        """

    def permute_from_peer(self, dst: Any, src: Any, axes: Sequence[int], slot_bytes: int) -> None:
        """Do the same where `src` lies in another GPU's memory.

        Parameters
        ----------
        dst, src, axes
            As for `permute`.
        slot_bytes
            A part of at most so many bytes may go through local memory first; the queue holds
            `SLOTS` such parts at most. Larger ones are read in place.
        """

    def pack(self, dst: Any, src: Any) -> Callable[[], None]:
        """Queue a copy of a region into a C-ordered array; return a function that waits for it."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""


class HostQueue:
    """NumPy: done when the call returns."""

    kind = "numpy"

    def __init__(self) -> None:
        self._kernel = kernel_named("numpy")

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._kernel.empty(shape, dtype)

    def permute(self, dst: Any, src: Any, axes: Sequence[int], *, aside: bool = False) -> None:
        self._kernel.permute_into(dst, src, axes)

    def permute_and_drop(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        self.permute(dst, src if isinstance(src, np.ndarray) else src.get(), axes)

    def permute_from_peer(self, dst: Any, src: Any, axes: Sequence[int], slot_bytes: int) -> None:
        self.permute(dst, src, axes)

    def pack(self, dst: Any, src: Any) -> Callable[[], None]:
        self.permute(dst, src, range(src.ndim))
        return self.synchronize

    def synchronize(self) -> None:
        pass


class DeviceQueue:
    """CuPy: four streams of the calling thread's own.

    ::

        copies   [stage 1, part 0][stage 1, part 1][stage 1, part 2][stage 2, part 0] ...
        slots                     [part 0]         [part 1]         [part 2]
        aside    [stage 0: the worker's own pieces]
        kernels  [whatever else]
                   into slot 0      into slot 1      into slot 2      into slot 0

    A part of a peer's block is copied into a slot of local memory by a copy engine, which is
    quicker over NVLink than loads of a kernel are (389 against 320 GB/s between H200s), and then
    permuted from there. Slots are used in turn; all waiting is done by the device. Copies wait
    for slots to be emptied, so that goes before all other kernels (346 against 326 GB/s a GPU
    between four H200s). Others, beside which UCX copies, are the better for having no priority.

    The streams are non-blocking ones, so that waiting for them is not waiting for whatever else
    the process runs on its GPU. What was enqueued on the null stream before, where Dask's tasks
    make their arrays, is waited for (on the device) when the queue is made.
    """

    kind = "cupy"
    _per_thread = threading.local()

    def __init__(self, beside_copies: bool = False) -> None:
        import cupy

        self._cupy = cupy
        self._gently = beside_copies
        self._kernel = kernel_named("cupy")
        streams: dict[Any, Any] = self._per_thread.__dict__
        device = cupy.cuda.runtime.getDevice()
        if device not in streams:
            make = cupy.cuda.Stream
            priorities = (0, 0, 0, _FIRST)
            streams[device] = tuple(make(non_blocking=True, priority=p) for p in priorities)
        self._all = self._stream, self._copies, self._aside, self._emptying = streams[device]
        self._slots: deque[_Slot] = deque()  # the one that has waited longest first
        self._unread: deque[tuple[Any, Any]] = deque()  # events, and what is read until then
        self._wait_for_null_stream()

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        # On the null stream: a block outlives this queue, and a pool keeps the memory of a
        # stream for that stream. What the null stream still does with memory that it gave
        # back before must be over before this queue writes there.
        array = self._kernel.empty(shape, dtype)
        self._wait_for_null_stream()
        return array

    def permute(self, dst: Any, src: Any, axes: Sequence[int], *, aside: bool = False) -> None:
        self._permute_on(self._aside if aside else self._stream, dst, src, axes)

    def _permute_on(self, stream: Any, dst: Any, src: Any, axes: Sequence[int]) -> None:
        self._kernel.permute_into(dst, src, axes, stream=stream, gently=self._gently)

    def permute_and_drop(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        if isinstance(src, np.ndarray):
            with self._stream:
                src = self._cupy.asarray(src)
        self.permute(dst, src, axes)
        # Its memory may be another's as soon as it is let go of: not before the kernel has read it.
        read = self._cupy.cuda.Event(disable_timing=True)
        read.record(self._stream)
        self._unread.append((read, src))
        while len(self._unread) > MOST_UNREAD or (self._unread and self._unread[0][0].done):
            self._unread.popleft()[0].synchronize()

    def permute_from_peer(self, dst: Any, src: Any, axes: Sequence[int], slot_bytes: int) -> None:
        pitch = engine_pitch(src.shape, src.strides, src.itemsize)
        if pitch is None or src.nbytes > slot_bytes:
            self.permute(dst, src, axes)
            return
        slot = self._next_slot(slot_bytes)
        near = self._cupy.ndarray(src.shape, src.dtype, slot.memory.data)
        self._copy(near, src, pitch)
        slot.full.record(self._copies)
        self._emptying.wait_event(slot.full)
        self._permute_on(self._emptying, dst, near, axes)
        slot.free.record(self._emptying)

    def pack(self, dst: Any, src: Any) -> Callable[[], None]:
        # By a copy engine too: beside UCX's copies it takes less from them than a kernel does.
        pitch = engine_pitch(src.shape, src.strides, src.itemsize)
        if pitch is None:
            self.permute(dst, src, range(src.ndim))
        else:
            self._copy(dst, src, pitch)
        packed = self._cupy.cuda.Event(disable_timing=True)
        packed.record(self._stream if pitch is None else self._copies)
        wait: Callable[[], None] = packed.synchronize
        return wait

    def _copy(self, dst: Any, src: Any, pitch: Pitch) -> None:
        self._cupy.cuda.runtime.memcpy2DAsync(
            dst.data.ptr, pitch.run_bytes, src.data.ptr, pitch.stride_bytes,
            pitch.run_bytes, pitch.rows, _MEMCPY_DEFAULT, self._copies.ptr,
        )  # fmt: skip

    def synchronize(self) -> None:
        for stream in self._all:
            stream.synchronize()
        self._unread.clear()

    def _next_slot(self, slot_bytes: int) -> _Slot:
        """Return a slot that can be filled after what the copies' stream waits for."""
        if not self._slots:
            self._slots.extend(self._new_slots(slot_bytes))
        slot = self._slots.popleft()
        self._copies.wait_event(slot.free)  # of a new one nothing is recorded, nor waited for
        self._slots.append(slot)
        return slot

    def _new_slots(self, slot_bytes: int) -> Iterator[_Slot]:
        """Allocate all slots at once: each allocation takes as long as a part is on its way."""
        step_bytes = -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory = self.empty((SLOTS * step_bytes,), np.uint8)
        event = self._cupy.cuda.Event
        for start in range(0, memory.nbytes, step_bytes):
            part = memory[start : start + slot_bytes]
            yield _Slot(part, event(disable_timing=True), event(disable_timing=True))

    def _wait_for_null_stream(self) -> None:
        event = self._cupy.cuda.Stream.null.record()
        for stream in self._all:
            stream.wait_event(event)


def queue_for(kind: str, *, beside_copies: bool = False) -> Queue:
    """Return a new queue.

    Parameters
    ----------
    kind
        Of the arrays, "numpy" or "cupy".
    beside_copies
        Whether its kernels run beside copies from peers, and should leave them bandwidth.
    """
    return DeviceQueue(beside_copies) if kind == "cupy" else HostQueue()
