"""Parts of a block that lies in host memory, through a GPU on three streams.

::

    host      [fill 0][fill 1]        [fill 2]        [empty 0][fill 3]       [empty 1] ...
    up                [part 0][part 1]        [part 2]                [part 3]
    run                       [part 0][part 1]        [part 2]
    down                              [part 0][part 1]        [part 2]

`dask_p2p.plans.parts.steps` says what is done in which order, and what each step waits for: here
that is done, with an event for each stream and slot. Where an array lies in pinned memory, copies
begin or end there, and the host has nothing to fill or to empty.

CuPy is imported when a method is called, never with this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from dask_p2p.backends import device as device_module
from dask_p2p.backends.base import SLOTS, Timer
from dask_p2p.backends.host_copies import copy_on_host
from dask_p2p.backends.pinned import CANNOT_PIN, Pinned, is_pinned, registered
from dask_p2p.backends.pitch import Pitch, engine_pitch
from dask_p2p.backends.slots import KeptSlots, Slot
from dask_p2p.backends.timing import StreamTimings
from dask_p2p.plans.parts import Part, PartPlan, Step, steps
from dask_p2p.types import Array

__all__ = ["Copied", "PartStreams", "PartWork"]

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the driver sees from the addresses where they are


class PartWork(Protocol):
    """A block, and what is done with its parts."""

    plan: PartPlan
    arrays: Sequence[np.ndarray[Any, Any]]  # that are read
    is_reduced: bool

    def views(self, part: Part) -> Iterable[np.ndarray[Any, Any]]:
        """Return what a part reads of each array."""

    def place(self, part: Part) -> Any:
        """Return what selects a part's result from the output."""

    def call(self, part: Part, inputs: Sequence[Array]) -> Array:
        """Return what is made of a part in memory of the device, on the current stream."""

    def combined(self, part: Part, made: Array | None, result: Array) -> Array:
        """Return what is made of the results of all parts before, and of this one."""


@dataclass(slots=True)
class Copied:
    """What went through a GPU. Seconds are those of the device, waiting left out."""

    up_bytes: int = 0
    down_bytes: int = 0
    staged_bytes: int = 0  # of both, what threads copied into pinned memory, or out of it
    up: Timer = field(default_factory=Timer)
    run: Timer = field(default_factory=Timer)
    down: Timer = field(default_factory=Timer)


class PartStreams:
    """Three streams of the calling thread, and slots for parts on the current GPU.

    Parameters
    ----------
    register_from_bytes
        Input arrays of at least this size that do not lie in pinned memory are pinned where they
        are, for as long as they are read. Smaller ones are copied into slots of pinned memory.
    warn
        Is told what is missing, and why, where memory cannot be pinned: copies are slower then.
    ranges
        Makes a context that profilers show by its name.
    """

    _per_thread = threading.local()  # streams by device
    _kept_slots = KeptSlots()
    _kept_host_slots = KeptSlots()

    def __init__(
        self,
        register_from_bytes: int,
        warn: Callable[[str, str], None],
        ranges: Callable[..., AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        import cupy

        self.cupy = cupy
        self._device = device = cupy.cuda.runtime.getDevice()
        known: dict[Any, Any] = self._per_thread.__dict__
        if device not in known:
            make = cupy.cuda.Stream
            known[device] = {what: make(non_blocking=True) for what in ("up", "run", "down")}
        self.streams: dict[str, Any] = known[device]
        self.timings = StreamTimings(cupy.cuda.Event, cupy.cuda.get_elapsed_time)
        self.copied = Copied()
        self._register_from_bytes = register_from_bytes
        self._warn = warn
        self._ranges = ranges

    def run(self, work: PartWork, out: np.ndarray[Any, Any]) -> None:
        """Fill an array of host memory; return when that is done.

        Raises
        ------
        MemoryError
            If there is too little memory of the device.
        """
        # The function may use what others have made on the null stream.
        device_module.order_after_null_stream([self.streams["run"]])
        block = _Block(self, work, out)
        try:
            for step in steps(len(work.plan.parts), SLOTS, work.is_reduced):
                with self._ranges(f"{step.what} {step.part}"):
                    block.do(step)
        finally:
            # Whatever failed: nothing reads or writes any more what is given back.
            for stream in self.streams.values():
                stream.synchronize()
            self.timings.read()
            block.close()

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

    def registered(self, array: np.ndarray[Any, Any]) -> Callable[[], None] | None:
        """Pin an array where it is, if that is worth it; return what ends that."""
        return registered(array) if array.nbytes >= self._register_from_bytes else None


class _Block:
    """One block on its way through the GPU."""

    def __init__(self, of: PartStreams, work: PartWork, out: np.ndarray[Any, Any]) -> None:
        self._of, self._work, self._out = of, work, out
        self._plan = work.plan
        self._count = min(SLOTS, len(work.plan.parts))
        self._memory = of.device_memory(self._count * work.plan.slot_bytes)
        self._host_memory: Slot | None = None  # which may not be needed
        event = partial(of.cupy.cuda.Event, disable_timing=True)
        self._events = {(what, slot): event() for what in of.streams for slot in range(self._count)}
        self._results: list[Any] = [None] * SLOTS
        self._made: Any = None  # of the results of all parts so far
        self._unregister: list[Callable[[], None]] = []
        self._reached = [is_pinned(array) or self._registers(array) for array in work.arrays]
        self._reaches_out = is_pinned(out)

    def _registers(self, array: np.ndarray[Any, Any]) -> bool:
        if (unregister := self._of.registered(array)) is not None:
            self._unregister.append(unregister)
        return unregister is not None

    def close(self) -> None:
        """Give everything back; only when all streams are done."""
        self._results.clear()
        self._made = None
        for unregister in self._unregister:
            unregister()
        self._of.keep(self._memory, self._host_memory)

    def do(self, step: Step) -> None:
        """Do a step, or give it to its stream, after those that it has to wait for."""
        part, slot = self._plan.parts[step.part], step.part % SLOTS
        events = [self._events[what, number % SLOTS] for what, number in step.after]
        if step.what == "fill":
            self._fill(part, slot, events)
        elif step.what == "empty":
            self._empty(part, slot, events)
        else:
            stream, timer = self._of.streams[step.what], getattr(self._of.copied, step.what)
            for event in events:
                stream.wait_event(event)
            with self._of.timings.group(timer):
                self._of.timings.begin(stream)
                getattr(self, f"_{step.what}")(part, slot, stream)
            self._events[step.what, slot].record(stream)

    def _fill(self, part: Part, slot: int, events: list[Any]) -> None:
        """Have threads copy into a slot of the host what copies up cannot begin at."""
        for number, (view, at) in enumerate(self._inputs(part)):
            if view.size and self._pitch(number, view) is None:
                while events:
                    events.pop().synchronize()
                copy_on_host(_array_in(self._host(slot), at, view), view)
                self._of.copied.staged_bytes += view.nbytes

    def _up(self, part: Part, slot: int, stream: Any) -> None:
        for number, (view, at) in enumerate(self._inputs(part)):
            pitch = self._pitch(number, view)
            source = view if pitch else _array_in(self._host(slot), at, view)
            pitch = pitch or Pitch(1, view.nbytes, view.nbytes)
            to = self._device_slot(slot).data.ptr + at
            self._copy(to, pitch.run_bytes, _address(source), pitch.stride_bytes, pitch, stream)
            self._of.copied.up_bytes += view.nbytes

    def _run(self, part: Part, slot: int, stream: Any) -> None:
        # The copy down of what is dropped here is done before the stream goes on: what comes next
        # may have its memory.
        self._results[slot] = None
        memory = self._device_slot(slot)
        inputs = [
            self._of.cupy.ndarray(view.shape, view.dtype, memory[at:][: view.nbytes].data)
            for view, at in self._inputs(part)
        ]
        with stream:
            result = self._work.call(part, inputs)
            if self._work.is_reduced:
                result = self._work.combined(part, self._made, result)
                if 0 <= result.data.ptr - memory.data.ptr < memory.nbytes:
                    result = self._copied(result)  # out of what is filled anew
                self._made = result
            self._results[slot] = result if result.flags.c_contiguous else self._copied(result)

    def _copied(self, array: Array) -> Array:
        copy = self._of.cupy.empty(array.shape, array.dtype)
        self._of.cupy.copyto(copy, array)
        return copy

    def _down(self, part: Part, slot: int, stream: Any) -> None:
        result, target = self._results[slot], self._out[self._work.place(part)]
        pitch = _pitch_of(target) if self._reaches_out else None
        if pitch is None:
            target = _array_in(self._host(slot), self._plan.slot_bytes, target)
            pitch = Pitch(1, target.nbytes, target.nbytes)
        to, of = _address(target), result.data.ptr
        self._copy(to, pitch.stride_bytes, of, pitch.run_bytes, pitch, stream)
        self._of.copied.down_bytes += result.nbytes

    def _empty(self, part: Part, slot: int, events: list[Any]) -> None:
        """Have threads copy a result out of a slot of the host, if it had to go there."""
        target = self._out[self._work.place(part)]
        if self._reaches_out and _pitch_of(target) is not None:
            return
        for event in events:
            event.synchronize()
        copy_on_host(target, _array_in(self._host(slot), self._plan.slot_bytes, target))
        self._of.copied.staged_bytes += target.nbytes

    def _inputs(self, part: Part) -> Iterable[tuple[np.ndarray[Any, Any], int]]:
        """Return what a part reads of each array, and where that lies in a slot."""
        return zip(self._work.views(part), self._plan.places(part), strict=False)

    def _pitch(self, number: int, view: np.ndarray[Any, Any]) -> Pitch | None:
        """Return how a copy engine reads a part of an array; None if it goes through a slot."""
        return _pitch_of(view) if self._reached[number] else None

    def _device_slot(self, slot: int) -> Array:
        size_bytes = self._plan.slot_bytes
        return self._memory.memory[slot * size_bytes :][:size_bytes]

    def _host(self, slot: int) -> np.ndarray[Any, Any]:
        size_bytes = self._plan.host_slot_bytes
        if self._host_memory is None:
            self._host_memory = self._of.host_memory(self._count * size_bytes)
        memory: np.ndarray[Any, Any] = self._host_memory.memory[slot * size_bytes :][:size_bytes]
        return memory

    def _copy(
        self, to: int, to_stride: int, of: int, of_stride: int, pitch: Pitch, stream: Any
    ) -> None:
        runtime, size_bytes = self._of.cupy.cuda.runtime, pitch.run_bytes
        if pitch.rows == 1:
            if size_bytes:
                runtime.memcpyAsync(to, of, size_bytes, _MEMCPY_DEFAULT, stream.ptr)
        else:
            runtime.memcpy2DAsync(
                to, to_stride, of, of_stride, size_bytes, pitch.rows, _MEMCPY_DEFAULT, stream.ptr
            )


def _pitch_of(view: np.ndarray[Any, Any]) -> Pitch | None:
    """Return a view of host memory as a copy engine copies it; None if it does not."""
    if view.flags.c_contiguous:
        return Pitch(1, view.nbytes, view.nbytes)
    return engine_pitch(view.shape, view.strides, view.itemsize)


def _array_in(memory: np.ndarray[Any, Any], at: int, like: Any) -> np.ndarray[Any, Any]:
    """Return an array of this shape and dtype in memory of the host."""
    array: np.ndarray[Any, Any] = memory[at:][: like.nbytes].view(like.dtype).reshape(like.shape)
    return array


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
