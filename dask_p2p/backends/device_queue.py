"""The queue of a GPU: CuPy arrays, four streams, and copy engines concurrent with kernels."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.backends import device as device_module
from dask_p2p.backends.base import MOST_UNREAD, SLOTS, Timer, memory_order
from dask_p2p.backends.device import MEMCPY_DEFAULT, StreamTimings, is_managed
from dask_p2p.backends.host import RepeatingTimer
from dask_p2p.backends.kernels.copies import Pitch, engine_pitch
from dask_p2p.geometry import Layout
from dask_p2p.types import Array, DTypeLike, Kind


@dataclass(slots=True, eq=False, weakref_slot=True)  # arrays are not equal or unequal as a whole
class Slot:
    """Local memory for one part of a peer's block."""

    memory: Any
    full: Any  # event: the copy is complete
    free: Any  # event: the copy is no longer needed
    is_used: bool = False  # true if `free` has been recorded
    #: Results of the parts in this slot, by block. The slot's next user drops them.
    results: dict[Any, Any] = field(default_factory=dict)


class SlotCache:
    """Unused slots that are kept for the next queue, whose first copy an allocation would delay.

    They are freed after a while without use, or when memory runs out.
    """

    def __init__(self) -> None:
        self._slots: dict[int | None, list[list[Slot]]] = {}  # by device
        self._used_s = 0.0
        self._timer = RepeatingTimer(1.0, self._expire)
        self._lock = threading.Lock()

    def take(self, device: int | None, slot_bytes: int, count: int = 1) -> list[Slot]:
        """Return slots that meet both minimums, or an empty list; free smaller slots."""
        small = []  # freed after the lock is released
        with self._lock:
            unused = self._slots.get(device, [])
            while unused:
                slots = unused.pop()
                if len(slots) >= count and slots[0].memory.nbytes >= slot_bytes:
                    return slots
                small.append(slots)
        return []

    def keep(self, device: int | None, slots: list[Slot]) -> None:
        with self._lock:
            self._slots.setdefault(device, []).append(slots)
            self._used_s = time.monotonic()
        self._timer.start()

    def clear(self) -> bool:
        with self._lock:
            unused, self._slots = self._slots, {}
        return any(unused.values())

    def _expire(self) -> bool:
        with self._lock:
            if time.monotonic() - self._used_s < self._timer.interval_s:
                return True
        self.clear()
        return False


class UnreadArrays:
    """Arrays that are kept until a device has read them, because their memory may be reused.

    At most `max_arrays` arrays are kept; adding another one waits for the oldest.
    """

    def __init__(self, max_arrays: int) -> None:
        self._max_arrays = max_arrays
        self._arrays: deque[tuple[Any, Any]] = deque()  # events, and the arrays read until then

    def add(self, array: Array, read: Any) -> None:
        self._arrays.append((read, array))
        while len(self._arrays) > self._max_arrays or (self._arrays and self._arrays[0][0].done):
            # The array gets a name, because it must outlive the event.
            event, oldest = self._arrays.popleft()
            event.synchronize()
            del oldest

    def clear(self) -> None:
        self._arrays.clear()


logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 256  # alignment of allocations on a GPU
_FIRST = -1  # priority of a stream: lower numbers go first


class _Prefetched(NamedTuple):
    """A part of a peer's block, in a slot or in place."""

    array: Array
    slot: Slot | None


class DeviceQueue:
    """The queue of CuPy arrays: four streams of the calling thread, or of its own.

    ::

        copies      [stage 1, part 0][stage 1, part 1][stage 1, part 2][stage 2, part 0] ...
        emptying                     [part 0]         [part 1]         [part 2]
        concurrent  [stage 0: the worker's own pieces]
        stream      [all other work]
                      into slot 0      into slot 1      into slot 2      into slot 0

    A copy engine copies a part of a peer's block into a slot of local memory, and a kernel permutes
    it from there. Over NVLink copy engines are faster than a kernel's loads (389 against 320 GB/s
    between H200s). Slots are used in turn, and only the device waits. Copies wait for empty slots,
    so the kernels that empty slots have priority (346 against 326 GB/s a GPU between four H200s).
    The other streams have none, because UCX's concurrent copies are faster without it.

    The streams are non-blocking, so that a wait for them does not wait for other work of the
    process. A queue belongs to the GPU that is current when it is made.
    """

    pinned_output = False
    _per_thread = threading.local()  # streams by device
    _kept_slots = SlotCache()

    def __init__(
        self, kind: Kind, leave_bandwidth: bool = False, has_own_streams: bool = False
    ) -> None:
        import cupy

        from dask_p2p.backends.kernels import cuda as kernels

        self._cupy = cupy
        self._kernels = kernels
        self._low_occupancy = leave_bandwidth
        self.kind = kind
        streams_by_device: dict[Any, Any] = {} if has_own_streams else self._per_thread.__dict__
        self._device = device = cupy.cuda.runtime.getDevice()
        if device not in streams_by_device:
            make = cupy.cuda.Stream
            first, second, third, last = (
                make(non_blocking=True, priority=p) for p in (0, 0, 0, _FIRST)
            )
            streams_by_device[device] = (first, second, third, last)
        self._all = streams_by_device[device]
        self._stream, self._copies, self.concurrent, self._emptying = self._all
        self._slots: deque[Slot] = deque()  # least recently used first
        self._in_place = False  # true without memory for slots
        self._unread = UnreadArrays(MOST_UNREAD)
        self._private = device_module.private_stream()
        self._timings = StreamTimings(cupy.cuda.Event, cupy.cuda.get_elapsed_time)
        self._allocated: list[Any] = []  # arrays of `empty` since the last `synchronize`
        self._items: dict[bytes, Any] = {}  # items that `fill` has written, and may still read

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        # Blocks are allocated on the null stream, for any current stream of the thread: a block
        # outlives this queue, and a pool keeps the memory of a stream for that stream. The null
        # stream may still use memory that it has freed; the queue writes there only afterwards.
        device_module.wait_for_null_stream()
        with self._cupy.cuda.Stream.null as stream:
            try:
                array = self._cupy.empty(tuple(shape), dtype)
            except MemoryError:
                if not self._kept_slots.clear():
                    raise
                array = self._cupy.empty(tuple(shape), dtype)
            if array.nbytes and is_managed(array.data.ptr):
                # Creates all pages in one call; kernels would create them one by one.
                self._cupy.cuda.runtime.memPrefetchAsync(
                    array.data.ptr, array.nbytes, self._device, stream.ptr
                )
        device_module.order_after_null_stream(self._all)
        self._allocated.append(array)
        return array

    def scratch(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        with self._private:
            array = self._cupy.empty(tuple(shape), dtype)
        event = self._private.record()
        for stream in self._all:
            stream.wait_event(event)
        return array

    def wait_until_written(self, blocks: Iterable[Any], *, any_stream: bool) -> None:
        device_module.wait_until_written(blocks, any_stream=any_stream)

    def permute(
        self, dst: Array, src: Array, axes: Sequence[int], *, concurrent: bool = False
    ) -> None:
        if src.device.id != self._device:
            self._permute_from_device(dst, src, axes)
        else:
            self._permute_on(self.concurrent if concurrent else self._stream, dst, src, axes)

    def _permute_on(self, stream: Any, dst: Array, src: Array, axes: Sequence[int]) -> None:
        self._timings.begin(stream)
        self._kernels.permute_into(dst, src, axes, stream=stream, low_occupancy=self._low_occupancy)

    def _permute_from_device(self, dst: Array, src: Array, axes: Sequence[int]) -> None:
        """Permute from another GPU of this process; the GPUs need no peer access."""
        with src.device:
            remote = DeviceQueue(self.kind)
            packed = remote.scratch(src.shape, src.dtype)
            remote.pack(packed, src)()
            remote.synchronize()
        local = self.scratch(src.shape, src.dtype)
        ends = local.data.ptr, self._device, packed.data.ptr, src.device.id
        self._cupy.cuda.runtime.memcpyPeerAsync(*ends, src.nbytes, self._stream.ptr)
        self._stream.synchronize()
        self.permute_and_drop(dst, local, axes)

    def permute_and_drop(self, dst: Array, src: Array, axes: Sequence[int]) -> None:
        if isinstance(src, np.ndarray):
            local = self.scratch(src.shape, src.dtype)
            local.set(src, stream=self._stream)
            src = local
        else:  # received by Dask, which makes arrays on the null stream
            device_module.order_after_null_stream([self._stream])
        self._permute_on(self._stream, dst, src, axes)
        # Keep it until the kernel has read it: its memory may be reused once it is dropped.
        read = self._cupy.cuda.Event(disable_timing=True)
        read.record(self._stream)
        self._unread.add(src, read)

    def fill(self, dst: Array, value: Any) -> None:
        item = self._items.get(value.tobytes())
        if item is None:
            item = self._items[value.tobytes()] = self.scratch((1,), value.dtype)
            item.set(value.reshape(1), stream=self._stream)
        everywhere = self._cupy.broadcast_to(item, dst.shape)
        self._permute_on(self._stream, dst, everywhere, range(dst.ndim))

    def prefetch(self, src: Array, slot_bytes: int) -> _Prefetched:
        view, order = src, tuple(range(src.ndim))
        pitch = engine_pitch(src.shape, src.strides, src.itemsize)
        if pitch is None:
            order = memory_order(src.strides)
            view = src.transpose(order)
            pitch = engine_pitch(view.shape, view.strides, view.itemsize)
        if pitch is None or src.nbytes > slot_bytes or not self._has_slots(slot_bytes):
            return _Prefetched(src, None)
        slot = self._slots[0]
        if src.nbytes > slot.memory.nbytes:  # made for an earlier holder with smaller parts
            return _Prefetched(src, None)
        self._slots.rotate(-1)
        if slot.is_used:
            self._copies.wait_event(slot.free)
        copy = self._cupy.ndarray(view.shape, src.dtype, slot.memory.data)
        self._copy(copy, view, pitch)
        slot.full.record(self._copies)
        if view is not src:
            copy = copy.transpose(tuple(map(order.index, range(src.ndim))))
        return _Prefetched(copy, slot)

    def permute_prefetched(self, dst: Array, part: _Prefetched, axes: Sequence[int]) -> None:
        if part.slot is None:
            self._permute_on(self._stream, dst, part.array, axes)
            return
        self._emptying.wait_event(part.slot.full)
        self._permute_on(self._emptying, dst, part.array, axes)
        part.slot.free.record(self._emptying)
        part.slot.is_used = True

    @contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        """Return a context that orders the queue's work within a stream.

        It follows the stream's earlier work, and the stream's later work follows it, so that no
        caller waits for the queue.
        """
        event = self._event
        event.record(stream)
        for queue_stream in self._all:
            queue_stream.wait_event(event)
        try:
            yield
        finally:
            for queue_stream in self._all:
                event.record(queue_stream)
                stream.wait_event(event)

    @cached_property
    def _event(self) -> Any:
        """An event that is recorded repeatedly; each wait is for its latest record."""
        return self._cupy.cuda.Event(disable_timing=True)

    @property
    def reading(self) -> Sequence[Any]:
        return self._copies, self._stream

    def pack(self, dst: Array, src: Array) -> Callable[[], None]:
        # A copy engine slows UCX's concurrent copies less than a kernel does.
        pitch = engine_pitch(src.shape, src.strides, src.itemsize)
        if pitch is not None and is_managed(src.data.ptr):
            pitch = None  # copy engines would copy managed memory through the host
        if pitch is None:
            self.permute(dst, src, range(src.ndim))
        else:
            self._copy(dst, src, pitch)
        packed = self._cupy.cuda.Event(disable_timing=True)
        packed.record(self._stream if pitch is None else self._copies)
        wait: Callable[[], None] = packed.synchronize
        return wait

    def _copy(self, dst: Array, src: Array, pitch: Pitch) -> None:
        self._timings.begin(self._copies)
        self._cupy.cuda.runtime.memcpy2DAsync(
            dst.data.ptr, pitch.run_bytes, src.data.ptr, pitch.stride_bytes,
            pitch.run_bytes, pitch.rows, MEMCPY_DEFAULT, self._copies.ptr,
        )  # fmt: skip

    def to_host(self, array: Array) -> Any:
        return array.get(stream=self._stream)

    def timing(self, timer: Timer) -> AbstractContextManager[None]:
        return self._timings.group(timer)

    def synchronize(self) -> None:
        if self._timings.has_begun:
            for stream in self._all:
                stream.synchronize()
            self._in_place = False
            self._timings.read()
            if self._slots:
                for slot in self._slots:
                    slot.is_used = False
                self._kept_slots.keep(self._device, list(self._slots))
                self._slots.clear()
        self._unread.clear()
        self._items.clear()
        while self._allocated:
            device_module.mark_written(self._allocated.pop())

    def _has_slots(self, slot_bytes: int) -> bool:
        """Return true if there is memory for slots; otherwise parts are read in place, slower."""
        if not self._slots and not self._in_place:
            try:
                slots = self._kept_slots.take(self._device, slot_bytes)
                if not slots:
                    # One call for all slots, which takes as long as the transfer of a part. The
                    # stream that fills them allocates them, and therefore does not wait.
                    layout = Layout(SLOTS * [(slot_bytes,)], alignment=_ALIGNMENT_BYTES)
                    with self._copies:
                        memory = self._cupy.empty((layout.size_bytes,), np.uint8)
                    event = partial(self._cupy.cuda.Event, disable_timing=True)
                    parts = layout.views(memory, np.uint8)
                    slots = [Slot(part, event(), event()) for part in parts]
                self._slots.extend(slots)
            except MemoryError as exc:  # from CuPy or RMM
                logger.debug("no memory for slots, reading parts in place: %s", exc)
                self._in_place = True
        return not self._in_place
