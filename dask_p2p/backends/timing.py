"""How long work took: `Timer`, and the pairs of events by which a device tells."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

__all__ = ["MOST_PAIRS", "StreamTimings", "Timer"]

#: Pairs of events that a queue has at a time. A pair takes the host 3 µs.
MOST_PAIRS = 64


@dataclass(slots=True)
class Timer:
    """Adds up what groups of work took; as a context, the time of the block."""

    seconds: float = 0.0
    _start_s: float = 0.0

    def __enter__(self) -> None:
        self._start_s = perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.seconds += perf_counter() - self._start_s


class _Pair(NamedTuple):
    """Events before and after a group's work on one stream."""

    timer: Timer
    stream: Any
    start: Any
    stop: Any


class StreamTimings:
    """Times work on streams, and waits for none of it.

    Parameters
    ----------
    event
        Makes an event that can be timed.
    elapsed_ms
        Returns the milliseconds between two events that have happened.
    """

    def __init__(self, event: Callable[[], Any], elapsed_ms: Callable[[Any, Any], float]) -> None:
        self._event, self._elapsed_ms = event, elapsed_ms
        self._pairs: deque[_Pair] = deque()  # the oldest first
        self._timer: Timer | None = None  # of the group that is being queued
        self._group: dict[int, _Pair] = {}  # its pairs, by the stream's address

    @contextmanager
    def group(self, timer: Timer) -> Iterator[None]:
        """Add to a timer, in the end, what is queued in the block: on each stream from `begin`."""
        self._timer = timer
        try:
            yield
            for pair in self._group.values():
                pair.stop.record(pair.stream)
                self._pairs.append(pair)
        finally:
            self._timer = None
            self._group.clear()

    def begin(self, stream: Any) -> None:
        """Note that work of the group follows on a stream.

        With too many pairs that have not happened the group is not timed.
        """
        if self._timer is None or stream.ptr in self._group:
            return
        if len(self._pairs) < MOST_PAIRS:
            start, stop = self._event(), self._event()
        elif self._pairs[0].stop.done:
            start, stop = self._read_oldest()
        else:
            return
        start.record(stream)
        self._group[stream.ptr] = _Pair(self._timer, stream, start, stop)

    def read(self) -> None:
        """Add all that was timed to its timers. Call it when the streams are synchronised."""
        while self._pairs:
            self._read_oldest()

    def _read_oldest(self) -> tuple[Any, Any]:
        timer, _, start, stop = self._pairs.popleft()
        timer.seconds += self._elapsed_ms(start, stop) / 1e3
        return start, stop
