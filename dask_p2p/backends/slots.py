"""Device memory that a queue uses for a while: slots for parts, and arrays that are being read."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dask_p2p.backends.repeating import MakeTimer, RepeatingTimer
from dask_p2p.types import Array


@dataclass(slots=True, eq=False, weakref_slot=True)  # arrays are not equal or unequal as a whole
class Slot:
    """Local memory for one part of a peer's block."""

    memory: Any
    full: Any  # event: the copy is complete
    free: Any  # event: the copy is no longer needed
    is_used: bool = False  # whether `free` has been recorded
    #: What was made of the part, by who did. Whoever has the slot next drops it.
    results: dict[Any, Any] = field(default_factory=dict)


class KeptSlots:
    """Slots that queues no longer use, for the next queue: allocating delays its first copy.

    They are given up when nobody has used any for a while, or when memory runs out.
    """

    def __init__(
        self,
        keep_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        timer: MakeTimer = threading.Timer,
    ) -> None:
        self._kept: dict[int | None, list[list[Slot]]] = {}  # by device
        self._used_s, self._clock = 0.0, clock
        self._timer = RepeatingTimer(keep_s, self._expire, timer)
        self._lock = threading.Lock()

    def take(self, device: int | None, slot_bytes: int, count: int = 1) -> list[Slot]:
        """Return so many slots at least of so many bytes, or none. Smaller ones go."""
        small = []  # which are freed only when the lock is
        with self._lock:
            kept = self._kept.get(device, [])
            while kept:
                slots = kept.pop()
                if len(slots) >= count and slots[0].memory.nbytes >= slot_bytes:
                    return slots
                small.append(slots)
        return []

    def keep(self, device: int | None, slots: list[Slot]) -> None:
        """Keep slots, which may be in use until their events."""
        with self._lock:
            self._kept.setdefault(device, []).append(slots)
            self._used_s = self._clock()
        self._timer.start()

    def clear(self) -> bool:
        """Give all up; return whether there were any."""
        with self._lock:
            kept, self._kept = self._kept, {}
        return any(kept.values())

    def _expire(self) -> bool:
        with self._lock:
            if self._clock() - self._used_s < self._timer.interval_s:
                return True
        self.clear()
        return False


class BeingRead:
    """Arrays that are kept until a device has read them: their memory may be another's after that.

    At most `most` of them, the oldest are waited for.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: deque[tuple[Any, Any]] = deque()  # events, and what is read until then

    def add(self, array: Array, read: Any) -> None:
        """Keep an array until this event has happened."""
        self._kept.append((read, array))
        while len(self._kept) > self._most or (self._kept and self._kept[0][0].done):
            # By name: the array must outlive the event, and the deque holds it no more.
            event, oldest = self._kept.popleft()
            event.synchronize()
            del oldest

    def clear(self) -> None:
        """Drop all of them; only when everything is done."""
        self._kept.clear()
