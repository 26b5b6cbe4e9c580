"""A block in host memory that goes through a GPU in parts, on three streams.

::

    threads   [fill 0][fill 1][fill 2]        [fill 3][empty 0]       [empty 1] ...
    up                [part 0][part 1][part 2]        [part 3]
    run                       [part 0][part 1][part 2]        [part 3]
    down                              [part 0][part 1][part 2]

`dask_p2p.plans.base.schedule_steps` defines the order of steps and their dependencies. This module
executes them, with an event for each stream and slot. If an array lies in pinned memory, copies
begin or end there, and the host does not fill or empty slots. The next block may start when all
work of a block is queued; it follows in the same memory, slot by slot.

Methods import CuPy; the import of this module does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, ClassVar

import numpy as np

from dask_p2p.backends import device as device_module
from dask_p2p.backends.base import SLOTS, Timer
from dask_p2p.backends.device import MEMCPY_DEFAULT, StreamTimings
from dask_p2p.backends.device_queue import Slot, SlotCache
from dask_p2p.backends.host import copy_on_host, start_copy
from dask_p2p.backends.host_memory import CANNOT_PIN, Pinned, is_pinned, pin_in_place
from dask_p2p.backends.kernels.copies import Pitch, engine_pitch
from dask_p2p.plans.base import Step, schedule_steps
from dask_p2p.types import Array

# Slots in device and host memory, which the parts of one block use in turn.
#
# A block may get slots that queued work of another block still uses. Its first parts wait for that
# work, slot by slot.


class Ring:
    """The slots of one block, and an event for each stream and slot."""

    def __init__(
        self,
        streams: HostStreams,
        count: int,  # number of slots
        slot_bytes: int,  # least size of a slot in device memory
        host_slot_bytes: int,  # least size of a slot in host memory
    ) -> None:
        self._streams, self._count = streams, count
        self.slots = streams.device_slots(count, slot_bytes)
        self._host_slots: list[Slot] = []  # allocated when needed
        self._host_slot_bytes = host_slot_bytes
        event = partial(streams.cupy.cuda.Event, disable_timing=True)
        self._events = {
            (action, slot): event() for action in streams.streams for slot in range(count)
        }
        self.parts = 0  # number of parts that have been queued
        self._is_taken = True

    def on_device(self, part: int, index: int, like: Any) -> Array:
        """Return an array with the shape and dtype of `like` in a part's slot, from a byte on."""
        memory = self.slots[part % self._count].memory[index:][: like.nbytes]
        return self._streams.cupy.ndarray(like.shape, like.dtype, memory.data)

    def on_host(self, part: int, index: int, like: Any) -> np.ndarray[Any, Any]:
        if not self._host_slots:
            self._host_slots = self._streams.host_slots(self._count, self._host_slot_bytes)
        memory = self._host_slots[part % self._count].memory[index:][: like.nbytes]
        array: np.ndarray[Any, Any] = memory.view(like.dtype).reshape(like.shape)
        return array

    def to_fill(
        self, part: int, index: int, like: Any, after: Iterable[tuple[str, int]]
    ) -> np.ndarray[Any, Any]:
        """Return an array in host memory that no copy reads, after these actions of parts."""
        array = self.on_host(part, index, like)
        for event in self._events_before(self._host_slots, part, after):
            event.synchronize()
        return array

    @contextmanager
    def queue_action(
        self, action: str, part: int, after: Iterable[tuple[str, int]]
    ) -> Iterator[Any]:
        """Return a context that queues an action of a part, after these actions of parts.

        Its value is the stream.
        """
        stream, slot = self._streams.streams[action], part % self._count
        for event in self._events_before(self.slots if action == "up" else [], part, after):
            stream.wait_event(event)
        yield stream
        event = self._events[action, slot]
        event.record(stream)
        self.parts = max(self.parts, part + 1)
        # A part frees its slot on the host after "up", and that of the device after "down".
        for freed_slot in (self._host_slots if action == "up" else self.slots)[slot : slot + 1]:
            freed_slot.free, freed_slot.is_used = event, True

    def wait(self, action: str, part: int) -> None:
        self._events[action, part % self._count].synchronize()

    def _events_before(
        self, slots: list[Slot], part: int, after: Iterable[tuple[str, int]]
    ) -> Iterator[Any]:
        for action, number in after:
            yield self._events[action, number % self._count]
        if part < self._count and slots and slots[part].is_used:  # by the previous block
            yield slots[part].free

    def give_back(self) -> None:
        """Return the slots for another block, which uses each one after its queued work.

        The ring keeps references to them, so that they are not freed before its work ends.
        """
        if self._is_taken:
            self._is_taken = False
            self._streams.keep(*map(self._oldest_first, (self.slots, self._host_slots)))

    def _oldest_first(self, slots: list[Slot]) -> list[Slot]:
        first = self.parts % max(1, len(slots))
        return slots[first:] + slots[:first]


# Transfers between host memory and a GPU: three streams, and memory for parts on both sides.
#
# A new object imports CuPy; the import of this module does not.


class HostStreams:
    """Three streams of the current GPU, and memory for parts that is kept for reuse.

    All blocks of a process go through the same streams. A block can start while the last parts of
    another one are in transit, without delaying them. If memory cannot be pinned, copies are
    slower, and the object calls `warn` with the problem and its cause.
    """

    _streams: ClassVar[dict[int, dict[str, Any]]] = {}  # by device
    _kept_slots = SlotCache()
    _kept_host_slots = SlotCache()

    def __init__(self, warn: Callable[..., None]) -> None:
        import cupy

        self.cupy = cupy
        self._device = device = cupy.cuda.runtime.getDevice()
        if device not in self._streams:
            new_stream = partial(cupy.cuda.Stream, non_blocking=True)
            streams = {action: new_stream() for action in ("up", "run", "down")}
            self._streams.setdefault(device, streams)  # another thread may do this concurrently
        self.streams = self._streams[device]
        self.timings = StreamTimings(cupy.cuda.Event, cupy.cuda.get_elapsed_time)
        self._warn = warn

    def device_slots(self, count: int, size_bytes: int) -> list[Slot]:
        if slots := self._kept_slots.take(self._device, size_bytes, count):
            return slots
        with self.streams["up"]:  # the stream that fills it, which therefore does not wait
            return _divide_memory(self.cupy.empty((count * size_bytes,), np.uint8), count)

    def host_slots(self, count: int, size_bytes: int) -> list[Slot]:
        if slots := self._kept_host_slots.take(None, size_bytes, count):
            return slots
        try:
            return _divide_memory(np.asarray(Pinned(count * size_bytes)), count)
        except (OSError, MemoryError, self.cupy.cuda.runtime.CUDARuntimeError) as exc:
            self._warn(CANNOT_PIN, f"{type(exc).__name__}: {exc}")
            return _divide_memory(np.empty(count * size_bytes, np.uint8), count)

    @classmethod
    def drop_slots(cls) -> None:
        cls._kept_slots.clear()

    def keep(self, slots: list[Slot], host_slots: list[Slot]) -> None:
        """Keep memory for a while for the next block, which waits until it is free."""
        for cache, device, unused_slots in (
            (self._kept_slots, self._device, slots),
            (self._kept_host_slots, None, host_slots),
        ):
            if unused_slots:
                cache.keep(device, unused_slots)

    def copy_up(self, to: Array, src: np.ndarray[Any, Any], pitch: Pitch | None = None) -> None:
        """Queue a copy of a host array with this pitch to device memory; None: it is contiguous."""
        ptr, pitch = to.data.ptr, pitch or _contiguous_pitch(src)
        self._copy(ptr, pitch.run_bytes, src.ctypes.data, pitch.stride_bytes, pitch, "up")

    def copy_down(self, to: np.ndarray[Any, Any], src: Array, pitch: Pitch | None = None) -> None:
        """Queue a copy of device memory to a host array with this pitch; None: contiguous."""
        ptr, pitch = src.data.ptr, pitch or _contiguous_pitch(to)
        self._copy(to.ctypes.data, pitch.stride_bytes, ptr, pitch.run_bytes, pitch, "down")

    def _copy(
        self, to: int, to_stride: int, src: int, of_stride: int, pitch: Pitch, action: str
    ) -> None:
        runtime, stream = self.cupy.cuda.runtime, self.streams[action].ptr
        size_bytes, rows = pitch.run_bytes, pitch.rows
        if rows > 1:
            runtime.memcpy2DAsync(
                to, to_stride, src, of_stride, size_bytes, rows, MEMCPY_DEFAULT, stream
            )
        elif size_bytes:
            runtime.memcpyAsync(to, src, size_bytes, MEMCPY_DEFAULT, stream)

    def synchronize(self) -> None:
        """Wait for all three streams; afterwards no copy uses the blocks' memory."""
        for stream in self.streams.values():
            stream.synchronize()


def _divide_memory(memory: Any, count: int) -> list[Slot]:
    size_bytes = memory.nbytes // count
    return [Slot(memory[at * size_bytes :][:size_bytes], None, None) for at in range(count)]


def pitch_of(view: np.ndarray[Any, Any]) -> Pitch | None:
    """Return the pitch of a view of host memory; None if copy engines cannot copy it."""
    if view.flags.c_contiguous:
        return _contiguous_pitch(view)
    return engine_pitch(view.shape, view.strides, view.itemsize)


def _contiguous_pitch(view: np.ndarray[Any, Any]) -> Pitch:
    return Pitch(1, view.nbytes, view.nbytes)


OnIssued = Callable[[], AbstractContextManager[Any]]


@dataclass(slots=True)
class GpuTraffic:
    """Bytes that went through a GPU, and seconds of the device, without waits."""

    up_bytes: int = 0
    down_bytes: int = 0
    up: Timer = field(default_factory=Timer)
    run: Timer = field(default_factory=Timer)
    down: Timer = field(default_factory=Timer)


class PartStreams(HostStreams):
    """The path of blocks, part by part, through the current GPU.

    Input arrays of at least `register_from_bytes` outside pinned memory are pinned in place while
    they are read; smaller ones are copied into slots. `on_issued` returns a context, entered when
    all work of a block is queued and the previous block is finished. In it the thread only waits
    for the queued work, and the next block may start.
    """

    _waits = Lock()  # held inside `on_issued`

    def __init__(
        self,
        register_from_bytes: float,
        warn: Callable[..., None],
        on_issued: OnIssued | None = None,
    ) -> None:
        super().__init__(warn)
        self.copied = GpuTraffic()
        self._register_from_bytes = register_from_bytes
        self._on_issued = on_issued

    def run(self, work: Any, out: np.ndarray[Any, Any]) -> None:
        """Fill an array in host memory by the work of a `GpuMapBlock`, and wait for the end.

        Raises `MemoryError` if the device has too little memory.
        """
        # The function may use arrays that others have made on the null stream.
        device_module.order_after_null_stream([self.streams["run"]])
        block = _BlockInTransit(self, work, out)
        try:
            for step in schedule_steps(len(work.plan.parts), SLOTS, work.is_reduced):
                block.do(step)
            if self._on_issued is None or not is_pinned(out):  # others need more work
                block.wait()
            else:
                block.ring.give_back()
                with self._waits, self._on_issued():
                    block.wait()
        except BaseException:
            self.synchronize()  # no stream may use the memory that is given back
            raise
        finally:
            block.close()

    def pin(self, array: np.ndarray[Any, Any]) -> Callable[[], None] | None:
        """Pin a large array in place; return the function that unpins it, or None."""
        return pin_in_place(array) if array.nbytes >= self._register_from_bytes else None


class _BlockInTransit:
    """One block in transit through the GPU."""

    def __init__(self, streams: PartStreams, work: Any, out: np.ndarray[Any, Any]) -> None:
        self._streams, self._work, self._out = streams, work, out
        self._plan = work.plan
        count, slot_bytes = min(SLOTS, len(work.plan.parts)), work.plan.slot_bytes
        self.ring = Ring(streams, count, slot_bytes, work.plan.host_slot_bytes)
        self._filling: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)  # by part
        self._combined: Any = None  # combined result of all parts so far
        self._unregister: list[Callable[[], None]] = []
        self._reached = [is_pinned(array) or self._registers(array) for array in work.arrays]
        self._reaches_out = is_pinned(out)

    def _registers(self, array: np.ndarray[Any, Any]) -> bool:
        if (unregister := self._streams.pin(array)) is not None:
            self._unregister.append(unregister)
        return unregister is not None

    def wait(self) -> None:
        for action in self._streams.streams:
            self.ring.wait(action, len(self._plan.parts) - 1)
        self._streams.timings.read()

    def close(self) -> None:
        """Return all memory; only after the streams' work with it."""
        for number in list(self._filling):
            self._wait_until_filled(number)
        for slot in self.ring.slots:
            slot.results.pop(self, None)
        self._combined = None
        for unregister in self._unregister:
            unregister()
        self.ring.give_back()

    def do(self, step: Step) -> None:
        if step.action in ("fill", "empty"):
            getattr(self, f"_{step.action}")(step)
            return
        if step.action == "up":
            self._wait_until_filled(step.part)
        timer = getattr(self._streams.copied, step.action)
        with (
            self.ring.queue_action(step.action, step.part, step.after) as stream,
            self._streams.timings.group(timer),
        ):
            self._streams.timings.begin(stream)
            getattr(self, f"_{step.action}")(step.part, stream)

    def _fill(self, step: Step) -> None:
        for number, (view, index) in enumerate(self._inputs(step.part)):
            if view.size and self._pitch(number, view) is None:
                to = self.ring.to_fill(step.part, index, view, step.after)
                self._filling[step.part].append(start_copy(to, view))

    def _wait_until_filled(self, number: int) -> None:
        for wait in self._filling.pop(number, ()):
            wait()

    def _up(self, number: int, stream: Any) -> None:
        for nth, (view, index) in enumerate(self._inputs(number)):
            pitch = self._pitch(nth, view)
            source = view if pitch else self.ring.on_host(number, index, view)
            self._streams.copy_up(self.ring.on_device(number, index, view), source, pitch)
            self._streams.copied.up_bytes += view.nbytes

    def _run(self, number: int, stream: Any) -> None:
        # The results dropped here have been copied down before the stream continues, so that the
        # next results may use their memory.
        slot, part = self.ring.slots[number % SLOTS], self._plan.parts[number]
        slot.results.clear()
        inputs = [self.ring.on_device(number, index, view) for view, index in self._inputs(number)]
        with stream:
            result = self._work.call(part, inputs)
            if self._work.is_reduced:
                result = self._work.combine(part, self._combined, result)
                if 0 <= result.data.ptr - slot.memory.data.ptr < slot.memory.nbytes:
                    result = self._contiguous_copy(result)  # its slot will be filled again
                self._combined = result
            is_contiguous = result.flags.c_contiguous
            slot.results[self] = result if is_contiguous else self._contiguous_copy(result)

    def _contiguous_copy(self, array: Array) -> Array:
        copy = self._streams.cupy.empty(array.shape, array.dtype)
        self._streams.cupy.copyto(copy, array)
        return copy

    def _down(self, number: int, stream: Any) -> None:
        result, target = self.ring.slots[number % SLOTS].results[self], self._target(number)
        pitch = pitch_of(target) if self._reaches_out else None
        if pitch is None:
            target = self.ring.on_host(number, self._plan.slot_bytes, target)
        self._streams.copy_down(target, result, pitch)
        self._streams.copied.down_bytes += result.nbytes

    def _empty(self, step: Step) -> None:
        target = self._target(step.part)
        if self._reaches_out and pitch_of(target) is not None:
            return
        for action, number in step.after:
            self.ring.wait(action, number)
        copy_on_host(target, self.ring.on_host(step.part, self._plan.slot_bytes, target))

    def _inputs(self, number: int) -> Iterable[tuple[np.ndarray[Any, Any], int]]:
        part = self._plan.parts[number]
        return zip(self._work.views(part), self._plan.input_indices(part), strict=False)

    def _target(self, number: int) -> Any:
        return self._out[self._work.output_slices(self._plan.parts[number])]

    def _pitch(self, number: int, view: np.ndarray[Any, Any]) -> Pitch | None:
        return pitch_of(view) if self._reached[number] else None
