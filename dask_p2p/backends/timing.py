"""How long work took: `Timer`, and the pairs of events by which a device tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

#: Pairs of events that a queue has at a time. To make one, and read it, takes the host 10 µs.
MOST_PAIRS = 64


@dataclass(slots=True)
class Timer:
    """Adds up what groups of work took; as a context, the time of the block."""

    groups: int = 0  # of work in all
    timed: int = 0  # of these
    timed_s: float = 0.0
    clock: Callable[[], float] = perf_counter
    _start_s: float = 0.0

    @property
    def seconds(self) -> float:
        """What all groups took: those that were not timed as long as the others, on average."""
        return self.timed_s * self.groups / self.timed if self.timed else 0.0

    def add(self, time_s: float) -> None:
        """Note what a group took."""
        self.timed += 1
        self.timed_s += time_s

    def __enter__(self) -> None:
        self._start_s = self.clock()

    def __exit__(self, *exc: object) -> None:
        self.groups += 1
        self.add(self.clock() - self._start_s)


class _Pair(NamedTuple):
    """Events before and after a group's work on one stream."""

    timer: Timer
    stream: Any
    start: Any
    stop: Any


class StreamTimings:
    """Times work on streams, and waits for none of it.

    Of many groups of one timer it times the first, the eighth, the 64th and so on: all of them
    would take the host longer than one exchange should be delayed. `event` makes one that can be
    timed, `elapsed_ms` tells the time between two that have happened.
    """

    def __init__(self, event: Callable[[], Any], elapsed_ms: Callable[[Any, Any], float]) -> None:
        self._event, self._elapsed_ms = event, elapsed_ms
        self._pairs: list[_Pair] = []
        self._timer: Timer | None = None  # of the group that is being queued, if it is timed
        self._pair: _Pair | None = None  # of that group
        self.has_begun = False  # anything since the last `read`

    @contextmanager
    def group(self, timer: Timer) -> Iterator[None]:
        """Add to a timer, in the end, what is queued in the block: on one stream, from `begin`."""
        number = timer.groups + 1
        is_power_of_8 = number & (number - 1) == 0 and number.bit_length() % 3 == 1
        if is_power_of_8 and len(self._pairs) < MOST_PAIRS:
            self._timer = timer
        try:
            yield
            timer.groups = number
            if self._pair is not None:
                self._pair.stop.record(self._pair.stream)
                self._pairs.append(self._pair)
        finally:
            self._timer = self._pair = None

    def begin(self, stream: Any) -> None:
        """Note that work of the group follows on a stream."""
        self.has_begun = True
        if self._timer is not None and self._pair is None:
            self._pair = _Pair(self._timer, stream, self._event(), self._event())
            self._pair.start.record(stream)

    def read(self) -> None:
        """Add all that was timed to its timers. Call it when the streams are synchronised."""
        for timer, _, start, stop in self._pairs:
            timer.add(self._elapsed_ms(start, stop) / 1e3)
        self._pairs.clear()
        self.has_begun = False
