"""A block in host memory that goes through a GPU in parts, on three streams.

::

    threads   [fill 0][fill 1][fill 2]        [fill 3][empty 0]       [empty 1] ...
    up                [part 0][part 1][part 2]        [part 3]
    run                       [part 0][part 1][part 2]        [part 3]
    down                              [part 0][part 1][part 2]

`dask_p2p.plans.parts.steps` defines the order of steps and their dependencies. This module executes
them, with an event for each stream and slot. If an array lies in pinned memory, copies begin or end
there, and the host does not fill or empty slots. The next block may start when all work of a block
is queued; it follows in the same memory, slot by slot.

Methods import CuPy; the import of this module does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Protocol

import numpy as np

from dask_p2p.backends import device as device_module
from dask_p2p.backends.base import SLOTS, Timer
from dask_p2p.backends.host.copies import begin_copy, copy_on_host
from dask_p2p.backends.host.pinned import is_pinned, registered
from dask_p2p.backends.kernels.pitch import Pitch
from dask_p2p.backends.pipelines.host_streams import HostStreams, array_in, pitch_of
from dask_p2p.backends.pipelines.slots import Slot
from dask_p2p.plans.parts import Part, PartPlan, Step, steps
from dask_p2p.types import Array

OnIssued = Callable[[], AbstractContextManager[Any]]


class GpuMapWork(Protocol):
    """A block, and the function of its parts."""

    plan: PartPlan
    arrays: Sequence[np.ndarray[Any, Any]]  # input arrays
    is_reduced: bool  # true if results are combined

    def views(self, part: Part) -> Iterable[np.ndarray[Any, Any]]:
        """Return a part's view of each array."""

    def output_slices(self, part: Part) -> Any:
        """Return the index of a part's result in the output."""

    def call(self, part: Part, inputs: Sequence[Array]) -> Array:
        """Return the function's result for a part in device memory, on the current stream."""

    def combined(self, part: Part, made: Array | None, result: Array) -> Array:
        """Return the combination of the previous parts' results with this part's result."""


@dataclass(slots=True)
class Copied:
    """Bytes that went through a GPU, and seconds of the device, without waits."""

    up_bytes: int = 0
    down_bytes: int = 0
    up: Timer = field(default_factory=Timer)
    run: Timer = field(default_factory=Timer)
    down: Timer = field(default_factory=Timer)


class PartStreams(HostStreams):
    """The path of blocks, part by part, through the current GPU.

    Parameters
    ----------
    register_from_bytes
        Input arrays of at least this size outside pinned memory are pinned in place while they are
        read. Smaller arrays are copied into slots of pinned memory.
    warn
        Called with the problem and its cause if memory cannot be pinned; copies are slower then.
    ranges
        Returns a context that profilers show by its name.
    on_issued
        Returns a context, entered when all work of a block is queued and the previous block is
        finished. In it the thread only waits for the queued work, and the next block may start.
    """

    _waits = Lock()  # held inside `on_issued`

    def __init__(
        self,
        register_from_bytes: float,
        warn: Callable[..., None],
        ranges: Callable[..., AbstractContextManager[Any]] = nullcontext,
        on_issued: OnIssued | None = None,
    ) -> None:
        super().__init__(warn)
        self.copied = Copied()
        self._register_from_bytes = register_from_bytes
        self._ranges, self._on_issued = ranges, on_issued

    def run(self, work: GpuMapWork, out: np.ndarray[Any, Any]) -> None:
        """Fill an array in host memory, and wait for the end.

        Raises `MemoryError` if the device has too little memory.
        """
        # The function may use arrays that others have made on the null stream.
        device_module.order_after_null_stream([self.streams["run"]])
        block = _BlockInTransit(self, work, out)
        try:
            for step in steps(len(work.plan.parts), SLOTS, work.is_reduced):
                with self._ranges(f"{step.action} {step.part}"):
                    block.do(step)
            if self._on_issued is None or not is_pinned(
                out
            ):  # only pinned outputs need no more work
                block.wait()
            else:
                block.give_slots_back()
                with self._waits, self._on_issued():
                    block.wait()
        except BaseException:
            self.synchronize()  # no stream may use the memory that is given back
            raise
        finally:
            block.close()

    def registered(self, array: np.ndarray[Any, Any]) -> Callable[[], None] | None:
        """Pin a large array in place; return the function that unpins it, or None."""
        return registered(array) if array.nbytes >= self._register_from_bytes else None


class _BlockInTransit:
    """One block in transit through the GPU."""

    def __init__(self, of: PartStreams, work: GpuMapWork, out: np.ndarray[Any, Any]) -> None:
        self._of, self._work, self._out = of, work, out
        self._plan = work.plan
        self._count = min(SLOTS, len(work.plan.parts))
        self._slots = of.device_slots(self._count, work.plan.slot_bytes)
        self._host_slots: list[Slot] = []  # allocated when needed
        self._filling: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)  # by slot
        self._has_slots = True
        event = partial(of.cupy.cuda.Event, disable_timing=True)
        self._events = {
            (action, slot): event() for action in of.streams for slot in range(self._count)
        }
        self._made: Any = None  # combined result of all parts so far
        self._unregister: list[Callable[[], None]] = []
        self._reached = [is_pinned(array) or self._registers(array) for array in work.arrays]
        self._reaches_out = is_pinned(out)

    def _registers(self, array: np.ndarray[Any, Any]) -> bool:
        if (unregister := self._of.registered(array)) is not None:
            self._unregister.append(unregister)
        return unregister is not None

    def give_slots_back(self) -> None:
        """Return the slots for another block, which uses each one after its queued work.

        This block keeps references to them, so that they are not freed before its work ends.
        """
        if self._has_slots:
            self._has_slots = False
            oldest_first = (self._rotated(slots) for slots in (self._slots, self._host_slots))
            self._of.keep(*oldest_first)

    def _rotated(self, slots: list[Slot]) -> list[Slot]:
        first = len(self._plan.parts) % max(1, len(slots))
        return slots[first:] + slots[:first]

    def wait(self) -> None:
        """Wait for the last part on all streams, and thereby for all parts."""
        for action in self._of.streams:
            self._events[action, (len(self._plan.parts) - 1) % SLOTS].synchronize()
        self._of.timings.read()

    def close(self) -> None:
        """Return all memory; only after the streams' work with it."""
        for number in list(self._filling):
            self._wait_until_filled(number)
        for slot in self._slots:
            slot.results.pop(self, None)
        self._made = None
        for unregister in self._unregister:
            unregister()
        self.give_slots_back()

    def do(self, step: Step) -> None:
        """Execute a step, or queue it on its stream, after its dependencies."""
        part, slot = self._plan.parts[step.part], step.part % SLOTS
        events = [self._events[action, number % SLOTS] for action, number in step.after]
        if step.action == "fill":
            self._fill(part, slot, events)
        elif step.action == "empty":
            self._empty(part, slot, events)
        else:
            stream, timer = self._of.streams[step.action], getattr(self._of.copied, step.action)
            if step.action == "up":
                self._wait_until_filled(slot)
                events += self._of_block_before(self._slots, part, slot)
            for event in events:
                stream.wait_event(event)
            with self._of.timings.group(timer):
                self._of.timings.begin(stream)
                getattr(self, f"_{step.action}")(part, slot, stream)
            self._events[step.action, slot].record(stream)
            self._record_use(step.action, slot)

    def _fill(self, part: Part, slot: int, events: list[Any]) -> None:
        """Start to copy unpinned inputs into a host slot by threads."""
        for number, (view, at) in enumerate(self._inputs(part)):
            if view.size and self._pitch(number, view) is None:
                to = array_in(self._host(slot), at, view)
                for event in (*events, *self._of_block_before(self._host_slots, part, slot)):
                    event.synchronize()
                self._filling[slot].append(begin_copy(to, view))

    def _wait_until_filled(self, slot: int) -> None:
        for wait in self._filling.pop(slot, ()):
            wait()

    def _of_block_before(self, slots: list[Slot], part: Part, slot: int) -> list[Any]:
        """Return the event of the previous block's last use of a slot, if this part is first."""
        is_first = part in self._plan.parts[: self._count]
        return [slots[slot].free] if is_first and slots[slot].is_used else []

    def _record_use(self, action: str, slot: int) -> None:
        """Record the event that frees a slot: of the device, the end of its result's copy down."""
        for each in (self._host_slots if action == "up" else self._slots)[slot : slot + 1]:
            each.free, each.is_used = self._events[action, slot], True

    def _up(self, part: Part, slot: int, stream: Any) -> None:
        for number, (view, at) in enumerate(self._inputs(part)):
            pitch = self._pitch(number, view)
            source = view if pitch else array_in(self._host(slot), at, view)
            self._of.copy_up(self._device_slot(slot)[at:], source, pitch)
            self._of.copied.up_bytes += view.nbytes

    def _run(self, part: Part, slot: int, stream: Any) -> None:
        # The results dropped here have been copied down before the stream continues, so that the
        # next results may use their memory.
        results = self._slots[slot].results
        results.clear()
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
                    result = self._copied(result)  # its slot will be filled again
                self._made = result
            results[self] = result if result.flags.c_contiguous else self._copied(result)

    def _copied(self, array: Array) -> Array:
        copy = self._of.cupy.empty(array.shape, array.dtype)
        self._of.cupy.copyto(copy, array)
        return copy

    def _down(self, part: Part, slot: int, stream: Any) -> None:
        result, target = self._slots[slot].results[self], self._out[self._work.output_slices(part)]
        pitch = pitch_of(target) if self._reaches_out else None
        if pitch is None:
            target = array_in(self._host(slot), self._plan.slot_bytes, target)
        self._of.copy_down(target, result, pitch)
        self._of.copied.down_bytes += result.nbytes

    def _empty(self, part: Part, slot: int, events: list[Any]) -> None:
        """Copy a result out of a host slot by threads, if it went there."""
        target = self._out[self._work.output_slices(part)]
        if self._reaches_out and pitch_of(target) is not None:
            return
        for event in events:
            event.synchronize()
        copy_on_host(target, array_in(self._host(slot), self._plan.slot_bytes, target))

    def _inputs(self, part: Part) -> Iterable[tuple[np.ndarray[Any, Any], int]]:
        """Return a part's view of each array, and its byte offset in a slot."""
        return zip(self._work.views(part), self._plan.input_indices(part), strict=False)

    def _pitch(self, number: int, view: np.ndarray[Any, Any]) -> Pitch | None:
        """Return the pitch of a part of an array; None if it goes through a host slot."""
        return pitch_of(view) if self._reached[number] else None

    def _device_slot(self, slot: int) -> Array:
        return self._slots[slot].memory[: self._plan.slot_bytes]

    def _host(self, slot: int) -> np.ndarray[Any, Any]:
        if not self._host_slots:
            self._host_slots = self._of.host_slots(self._count, self._plan.host_slot_bytes)
        memory: np.ndarray[Any, Any] = self._host_slots[slot].memory
        return memory
