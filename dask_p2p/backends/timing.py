"""Timing of work: `Timer`, and pairs of events on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

#: Most pairs of events of a queue at a time. To make and read one takes the host 10 µs.
MOST_PAIRS = 64


@dataclass(slots=True)
class Timer:
    """The sum of the times of groups of work; as a context, it adds the context's time."""

    groups: int = 0  # number of groups of work
    timed: int = 0  # number of timed groups
    timed_s: float = 0.0
    clock: Callable[[], float] = perf_counter
    _start_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Estimated time of all groups: the mean of timed groups times the number of groups."""
        return self.timed_s * self.groups / self.timed if self.timed else 0.0

    def add(self, time_s: float) -> None:
        """Add the time of a group."""
        self.timed += 1
        self.timed_s += time_s

    def __enter__(self) -> None:
        self._start_s = self.clock()

    def __exit__(self, *exc: object) -> None:
        self.groups += 1
        self.add(self.clock() - self._start_s)


class _TimedEvents(NamedTuple):
    """Events before and after a group's work on one stream."""

    timer: Timer
    stream: Any
    start: Any
    stop: Any


class StreamTimings:
    """Times of work on streams, measured without waiting.

    It times the first, the eighth, the 64th group of a timer and so on; timing all groups would
    delay an exchange too long. `event` returns a new event with timing. `elapsed_ms` returns the
    time between two events that have happened.
    """

    def __init__(self, event: Callable[[], Any], elapsed_ms: Callable[[Any, Any], float]) -> None:
        self._event, self._elapsed_ms = event, elapsed_ms
        self._pairs: list[_TimedEvents] = []
        self._timer: Timer | None = None  # timer of the present group, if it is timed
        self._pair: _TimedEvents | None = None  # events of that group
        self.has_begun = False  # true with work since the last `read`

    @contextmanager
    def group(self, timer: Timer) -> Iterator[None]:
        """Time the work queued in this context on one stream, from `begin` on."""
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
        """Record the start of the group's work on a stream."""
        self.has_begun = True
        if self._timer is not None and self._pair is None:
            self._pair = _TimedEvents(self._timer, stream, self._event(), self._event())
            self._pair.start.record(stream)

    def read(self) -> None:
        """Add all times to their timers. Call it after the streams are synchronised."""
        for timer, _, start, stop in self._pairs:
            timer.add(self._elapsed_ms(start, stop) / 1e3)
        self._pairs.clear()
        self.has_begun = False
