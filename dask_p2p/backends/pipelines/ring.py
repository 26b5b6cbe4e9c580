"""Slots in device and host memory, which the parts of one block use in turn.

A block may get slots that queued work of another block still uses. Its first parts wait for that
work, slot by slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from dask_p2p.backends.pipelines.host_streams import HostStreams
from dask_p2p.backends.pipelines.slots import Slot
from dask_p2p.types import Array


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
        """Return such an array in a part's slot of host memory."""
        if not self._host_slots:
            self._host_slots = self._streams.host_slots(self._count, self._host_slot_bytes)
        memory = self._host_slots[part % self._count].memory[index:][: like.nbytes]
        array: np.ndarray[Any, Any] = memory.view(like.dtype).reshape(like.shape)
        return array

    def to_fill(
        self, part: int, index: int, like: Any, after: Iterable[tuple[str, int]] = ()
    ) -> np.ndarray[Any, Any]:
        """Return an array in host memory that no copy reads, after these actions of parts."""
        array = self.on_host(part, index, like)
        for event in self._events_before(self._host_slots, part, after):
            event.synchronize()
        return array

    @contextmanager
    def queued(
        self, action: str, part: int, after: Iterable[tuple[str, int]] = ()
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
        for each in (self._host_slots if action == "up" else self.slots)[slot : slot + 1]:
            each.free, each.is_used = event, True

    def wait(self, action: str, part: int) -> None:
        """Wait for an action of a part."""
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
