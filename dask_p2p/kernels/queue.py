"""Work queues: where kernels run, in order, for one assembled block.

A queue hides what differs between host and device memory from the code that orders the work:
on a CPU everything is done when a call returns, on a GPU when the queue is synchronised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from dask_p2p.kernels import device as device_module
from dask_p2p.kernels import kernel_named
from dask_p2p.kernels._geometry import reduce_copy

__all__ = [
    "MOST_UNREAD",
    "SLOTS",
    "BeingRead",
    "DeviceQueue",
    "HostQueue",
    "KeptSlots",
    "Pitch",
    "Queue",
    "engine_pitch",
    "pitched",
    "queue_for",
]

logger = logging.getLogger(__name__)

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


@dataclass(slots=True, eq=False, weakref_slot=True)  # arrays are not equal or unequal as a whole
class _Slot:
    """Local memory for one part of a peer's block."""

    memory: Any
    full: Any  # event: what was copied is there
    free: Any  # event: what was there is not needed any more
    is_used: bool = False  # whether `free` says anything


class _Near(NamedTuple):
    """A part of a peer's block, in a slot or where it is."""

    array: Any
    slot: _Slot | None


class KeptSlots:
    """Slots that queues are done with, for the next one: to allocate them delays its first copy.

    They are given up when nobody has used any for `KEEP_S`, or when memory runs out.
    """

    KEEP_S = 1.0

    def __init__(self) -> None:
        self._kept: dict[int | None, list[list[_Slot]]] = {}  # by device
        self._used_s = 0.0  # monotonic
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def take(self, device: int | None, slot_bytes: int) -> list[_Slot]:
        """Return slots of at least so many bytes; none if there are none. Smaller ones go."""
        small = []  # which are freed only when the lock is
        with self._lock:
            kept = self._kept.get(device, [])
            while kept:
                slots = kept.pop()
                if slots[0].memory.nbytes >= slot_bytes:
                    return slots
                small.append(slots)
        return []

    def keep(self, device: int | None, slots: list[_Slot]) -> None:
        """Keep slots. Nothing reads or writes them any more."""
        for slot in slots:
            slot.is_used = False
        with self._lock:
            self._kept.setdefault(device, []).append(slots)
            self._used_s = time.monotonic()
            if self._timer is None:
                self._start_timer()

    def clear(self) -> bool:
        """Give all up; return whether there were any."""
        with self._lock:
            kept, self._kept = self._kept, {}
        return any(kept.values())

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self.KEEP_S, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        with self._lock:
            if time.monotonic() - self._used_s < self.KEEP_S:
                self._start_timer()
                return
            self._timer = None
        with device_module.device_work():
            self.clear()


class BeingRead:
    """Arrays that are kept until a device has read them: their memory may be another's after that.

    At most `most` of them, the oldest are waited for.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: deque[tuple[Any, Any]] = deque()  # events, and what is read until then

    def add(self, array: Any, read: Any) -> None:
        """Keep an array until this event has happened."""
        self._kept.append((read, array))
        while len(self._kept) > self._most or (self._kept and self._kept[0][0].done):
            # By name: the array must outlive the event, and the deque holds it no more.
            event, oldest = self._kept.popleft()
            event.synchronize()
            del oldest

    def clear(self) -> None:
        """Let go of all of them; only when everything is done."""
        self._kept.clear()


class Queue(Protocol):
    """An in-order queue of kernels."""

    kind: str  # of the arrays: "numpy" or "cupy"

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a new C-ordered array of the queue's kind for others, its values undefined."""

    def scratch(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return the same for the package's own use: let go of it when all is done with it."""

    def wait_until_written(self, blocks: Iterable[Any], *, any_stream: bool) -> None:
        """Wait until others have written these blocks; see `dask_p2p.kernels.device`."""

    def permute(self, dst: Any, src: Any, axes: Sequence[int], *, aside: bool = False) -> None:
        """Do ``dst[...] = src.transpose(axes)`` after what was queued before.

        Aside: in no order with the rest, beside it where there is room.
        """

    def permute_and_drop(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        """Do the same with an array of either kind that is nobody else's.

        The caller can let go of it at once: it is kept until it has been read.
        """

    def bring_near(self, src: Any, slot_bytes: int) -> Any:
        """Begin to bring a part of a block that lies in another GPU's memory.

        It is put into place by `permute_from_peer`, which takes what is returned here. Of `SLOTS`
        parts one has to be put into place before the next can be brought.

        Parameters
        ----------
        src
            The part. It is kept until all that is queued is done.
        slot_bytes
            A part of at most so many bytes may go through local memory. Larger ones are read in
            place.
        """

    def permute_from_peer(self, dst: Any, near: Any, axes: Sequence[int]) -> None:
        """Do ``dst[...] = part.transpose(axes)`` with a part from `bring_near`."""

    def pack(self, dst: Any, src: Any) -> Callable[[], None]:
        """Queue a copy of a region into a C-ordered array; return a function that waits for it."""

    def to_host(self, array: Any) -> Any:
        """Return an array of `scratch` as a NumPy array, after what was queued before."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""


class HostQueue:
    """NumPy: done when the call returns."""

    kind = "numpy"

    def __init__(self) -> None:
        self._kernel = kernel_named("numpy")

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._kernel.empty(shape, dtype)

    scratch = empty

    def wait_until_written(self, blocks: Iterable[Any], *, any_stream: bool) -> None:
        pass

    def permute(self, dst: Any, src: Any, axes: Sequence[int], *, aside: bool = False) -> None:
        self._kernel.permute_into(dst, src, axes)

    def permute_and_drop(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        self.permute(dst, src if isinstance(src, np.ndarray) else src.get(), axes)

    def bring_near(self, src: Any, slot_bytes: int) -> Any:
        return src

    def permute_from_peer(self, dst: Any, near: Any, axes: Sequence[int]) -> None:
        self.permute(dst, near, axes)

    def pack(self, dst: Any, src: Any) -> Callable[[], None]:
        self.permute(dst, src, range(src.ndim))
        return self.synchronize

    def to_host(self, array: Any) -> Any:
        return array

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
    the process runs on its GPU. A queue belongs to the GPU that is current when it is made.
    """

    kind = "cupy"
    _per_thread = threading.local()  # streams by device
    _kept_slots = KeptSlots()

    def __init__(self, beside_copies: bool = False) -> None:
        import cupy

        self._cupy = cupy
        self._gently = beside_copies
        self._kernel = kernel_named("cupy")
        known: dict[Any, Any] = self._per_thread.__dict__
        self._device = device = cupy.cuda.runtime.getDevice()
        if device not in known:
            make = cupy.cuda.Stream
            first, second, third, last = (
                make(non_blocking=True, priority=p) for p in (0, 0, 0, _FIRST)
            )
            known[device] = (first, second, third, last)
        self._all = self._stream, self._copies, self._aside, self._emptying = known[device]
        self._is_busy = False
        self._slots: deque[_Slot] = deque()  # the one that has waited longest first
        self._in_place = False  # because there is no memory for slots
        self._unread = BeingRead(MOST_UNREAD)
        self._private = device_module.private_stream()
        self._made: list[Any] = []  # by `empty`, since the last `synchronize`

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        # On the null stream: a block outlives this queue, and a pool keeps the memory of a
        # stream for that stream. Whatever stream an earlier task of the thread has left current,
        # what the null stream still does with memory that it gave back before must be over
        # before this queue writes there.
        device_module.wait_for_null_stream()
        with self._cupy.cuda.Stream.null as stream:
            try:
                array = self._kernel.empty(shape, dtype)
            except MemoryError:
                if not self._kept_slots.clear():
                    raise
                array = self._kernel.empty(shape, dtype)
            if array.nbytes and device_module.is_managed(array.data.ptr):
                # All its pages at once; kernels would have them made one by one.
                self._cupy.cuda.runtime.memPrefetchAsync(
                    array.data.ptr, array.nbytes, self._device, stream.ptr
                )
        device_module.order_after_null_stream(self._all)
        self._made.append(array)
        return array

    def scratch(self, shape: Sequence[int], dtype: Any) -> Any:
        with self._private:
            array = self._kernel.empty(shape, dtype)
        event = self._private.record()
        for stream in self._all:
            stream.wait_event(event)
        return array

    def wait_until_written(self, blocks: Iterable[Any], *, any_stream: bool) -> None:
        device_module.wait_until_written(blocks, any_stream=any_stream)

    def permute(self, dst: Any, src: Any, axes: Sequence[int], *, aside: bool = False) -> None:
        if src.device.id != self._device:
            self._permute_from_device(dst, src, axes)
        else:
            self._permute_on(self._aside if aside else self._stream, dst, src, axes)

    def _permute_on(self, stream: Any, dst: Any, src: Any, axes: Sequence[int]) -> None:
        self._is_busy = True
        self._kernel.permute_into(dst, src, axes, stream=stream, gently=self._gently)

    def _permute_from_device(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        """Do it where another GPU of this process holds `src`; these need not reach each other."""
        with src.device:
            there = queue_for(self.kind)
            packed = there.scratch(src.shape, src.dtype)
            there.pack(packed, src)()
            there.synchronize()
        near = self.scratch(src.shape, src.dtype)
        self._cupy.cuda.runtime.memcpyPeerAsync(
            near.data.ptr,
            self._device,
            packed.data.ptr,
            src.device.id,
            src.nbytes,
            self._stream.ptr,
        )
        self._stream.synchronize()
        self.permute_and_drop(dst, near, axes)

    def permute_and_drop(self, dst: Any, src: Any, axes: Sequence[int]) -> None:
        if isinstance(src, np.ndarray):
            near = self.scratch(src.shape, src.dtype)
            near.set(src, stream=self._stream)
            src = near
        else:  # of Dask, which makes what it receives on the null stream
            device_module.order_after_null_stream([self._stream])
        self._permute_on(self._stream, dst, src, axes)
        # Its memory may be another's as soon as it is let go of: not before the kernel has read it.
        read = self._cupy.cuda.Event(disable_timing=True)
        read.record(self._stream)
        self._unread.add(src, read)

    def bring_near(self, src: Any, slot_bytes: int) -> _Near:
        pitch = engine_pitch(src.shape, src.strides, src.itemsize)
        slot = None
        if pitch is not None and src.nbytes <= slot_bytes:
            slot = self._next_slot(slot_bytes)
        if pitch is None or slot is None:
            return _Near(src, None)
        near = self._cupy.ndarray(src.shape, src.dtype, slot.memory.data)
        self._copy(near, src, pitch)
        slot.full.record(self._copies)
        return _Near(near, slot)

    def permute_from_peer(self, dst: Any, near: _Near, axes: Sequence[int]) -> None:
        if near.slot is None:
            self._permute_on(self._stream, dst, near.array, axes)
            return
        self._emptying.wait_event(near.slot.full)
        self._permute_on(self._emptying, dst, near.array, axes)
        near.slot.free.record(self._emptying)
        near.slot.is_used = True

    def pack(self, dst: Any, src: Any) -> Callable[[], None]:
        # By a copy engine too: beside UCX's copies it takes less from them than a kernel does.
        pitch = engine_pitch(src.shape, src.strides, src.itemsize)
        if pitch is not None and device_module.is_managed(src.data.ptr):
            pitch = None  # such memory they bring through the host
        if pitch is None:
            self.permute(dst, src, range(src.ndim))
        else:
            self._copy(dst, src, pitch)
        packed = self._cupy.cuda.Event(disable_timing=True)
        packed.record(self._stream if pitch is None else self._copies)
        wait: Callable[[], None] = packed.synchronize
        return wait

    def _copy(self, dst: Any, src: Any, pitch: Pitch) -> None:
        self._is_busy = True
        self._cupy.cuda.runtime.memcpy2DAsync(
            dst.data.ptr, pitch.run_bytes, src.data.ptr, pitch.stride_bytes,
            pitch.run_bytes, pitch.rows, _MEMCPY_DEFAULT, self._copies.ptr,
        )  # fmt: skip

    def to_host(self, array: Any) -> Any:
        return array.get(stream=self._stream)

    def synchronize(self) -> None:
        if self._is_busy:
            for stream in self._all:
                stream.synchronize()
            self._is_busy = False
            if self._slots:
                self._kept_slots.keep(self._device, list(self._slots))
                self._slots.clear()
        self._unread.clear()
        while self._made:
            device_module.mark_written(self._made.pop())

    def _next_slot(self, slot_bytes: int) -> _Slot | None:
        """Return a slot that can be filled after what the copies' stream waits for.

        None if there is no memory for any: reading in place needs none, and is a little slower.
        """
        if not self._slots and not self._in_place:
            try:
                kept = self._kept_slots.take(self._device, slot_bytes)
                self._slots.extend(kept or self._new_slots(slot_bytes))
            except MemoryError as exc:  # of CuPy and of RMM too
                logger.debug("no memory to copy parts into, they are read in place: %s", exc)
                self._in_place = True
        if self._in_place:
            return None
        slot = self._slots.popleft()
        if slot.is_used:
            self._copies.wait_event(slot.free)
        self._slots.append(slot)
        return slot

    def _new_slots(self, slot_bytes: int) -> Iterator[_Slot]:
        """Allocate all slots at once: each allocation takes as long as a part is on its way.

        On the stream that fills them, so that there is nothing to wait for.
        """
        step_bytes = -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        event = self._cupy.cuda.Event
        with self._copies:
            memory = self._kernel.empty((SLOTS * step_bytes,), np.uint8)
        for number in range(SLOTS):
            part = memory[number * step_bytes :][:slot_bytes]
            yield _Slot(part, event(disable_timing=True), event(disable_timing=True))


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
