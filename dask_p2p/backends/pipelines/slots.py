"""Temporary device memory of a queue: slots for parts, and arrays that are being read."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dask_p2p.backends.host.repeating import MakeTimer, RepeatingTimer
from dask_p2p.types import Array


@dataclass(slots=True, eq=False, weakref_slot=True)  # arrays are not equal or unequal as a whole
class Slot:
    """Local memory for one part of a peer's block."""

    memory: Any
    full: Any  # event: the copy is complete
    free: Any  # event: the copy is no longer needed
    is_used: bool = False  # true if `free` has been recorded
    #: Results of the parts in this slot, by block. The slot's next user drops them.
    results: dict[Any, Any] = field(default_factory=dict)


class KeptSlots:
    """Unused slots that are kept for the next queue, whose first copy an allocation would delay.

    They are freed after a while without use, or when memory runs out.
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
        """Return slots that meet both minimums, or an empty list; free smaller slots."""
        small = []  # freed after the lock is released
        with self._lock:
            kept = self._kept.get(device, [])
            while kept:
                slots = kept.pop()
                if len(slots) >= count and slots[0].memory.nbytes >= slot_bytes:
                    return slots
                small.append(slots)
        return []

    def keep(self, device: int | None, slots: list[Slot]) -> None:
        """Keep slots, which may be in use until their events happen."""
        with self._lock:
            self._kept.setdefault(device, []).append(slots)
            self._used_s = self._clock()
        self._timer.start()

    def clear(self) -> bool:
        """Free all slots; return true if there were any."""
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
    """Arrays that are kept until a device has read them, because their memory may be reused.

    At most `most` arrays are kept; adding another one waits for the oldest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: deque[tuple[Any, Any]] = deque()  # events, and the arrays read until then

    def add(self, array: Array, read: Any) -> None:
        """Keep an array until this event has happened."""
        self._kept.append((read, array))
        while len(self._kept) > self._most or (self._kept and self._kept[0][0].done):
            # The array gets a name, because it must outlive the event.
            event, oldest = self._kept.popleft()
            event.synchronize()
            del oldest

    def clear(self) -> None:
        """Drop all arrays; only after all work with them."""
        self._kept.clear()
