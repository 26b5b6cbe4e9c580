"""Timing by events, on streams that a test moves on."""

from __future__ import annotations

import pytest

from dask_p2p.backends.device import StreamTimings, Timer


class Stream:
    """Whose work so far ends at ``at_ms``."""

    def __init__(self, ptr):
        self.ptr = ptr
        self.at_ms = 0.0


class Event:
    count = 0

    def __init__(self):
        Event.count += 1

    def record(self, stream):
        self.stream, self.at_ms = stream, stream.at_ms


def elapsed_ms(start, stop):
    assert start.stream is stop.stream
    return stop.at_ms - start.at_ms


@pytest.fixture
def timings():
    Event.count = 0
    return StreamTimings(Event, elapsed_ms)


def work(timings, stream, ms):
    timings.begin(stream)
    stream.at_ms += ms


def test_of_many_groups_few_are_timed(timings):
    stream, timer = Stream(1), Timer()
    for number in range(1, 101):
        with timings.group(timer):
            work(timings, stream, 1000 if number < 64 else 7000)
    timings.read()
    assert (timer.groups, timer.timed, Event.count) == (100, 3, 2 * 3)  # 1, 8, 64
    assert timer.seconds == pytest.approx(100 * (2 + 7) / 3)
