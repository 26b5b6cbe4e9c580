"""Timing by events, on streams that a test moves on."""

from __future__ import annotations

from contextlib import suppress

import pytest

from dask_p2p.backends.timing import MOST_PAIRS, StreamTimings, Timer


class Stream:
    """Whose work so far ends at ``at_ms``; events up to ``done_ms`` have happened."""

    def __init__(self, ptr):
        self.ptr = ptr
        self.at_ms = 0.0
        self.done_ms = 0.0


class Event:
    made = 0

    def __init__(self):
        Event.made += 1

    def record(self, stream):
        self.stream, self.at_ms = stream, stream.at_ms

    @property
    def done(self):
        return self.at_ms <= self.stream.done_ms


def elapsed_ms(start, stop):
    assert start.stream is stop.stream
    return stop.at_ms - start.at_ms


@pytest.fixture
def timings():
    Event.made = 0
    return StreamTimings(Event, elapsed_ms)


def work(timings, stream, ms):
    timings.begin(stream)
    stream.at_ms += ms


def test_groups_are_added_to_their_timers(timings):
    stream, other = Stream(1), Stream(2)
    first, second, empty = Timer(), Timer(), Timer()
    with timings.group(first):
        stream.at_ms += 7  # what the stream has to wait for before the work is not counted
        work(timings, stream, 1000)
        work(timings, stream, 500)
        work(timings, other, 250)
    work(timings, stream, 3)  # of no group
    with timings.group(second):
        work(timings, stream, 125)
    with timings.group(first):
        work(timings, stream, 2000)
    with timings.group(empty):
        pass
    assert first.seconds == second.seconds == 0
    timings.read()
    timings.read()
    assert (first.seconds, second.seconds, empty.seconds) == (3.75, 0.125, 0)
    assert Event.made == 2 * 4


def test_so_many_pairs_and_no_more(timings):
    stream, timer = Stream(1), Timer()
    for _ in range(MOST_PAIRS + 10):  # nothing of which has happened
        with timings.group(timer):
            work(timings, stream, 1000)
    stream.done_ms = 5000
    for _ in range(10):  # five have happened, and their events are used again
        with timings.group(timer):
            work(timings, stream, 1000)
    assert timer.seconds == 5
    timings.read()
    assert timer.seconds == MOST_PAIRS + 5
    assert Event.made == 2 * MOST_PAIRS


def test_a_group_that_fails_is_not_timed(timings):
    stream, timer = Stream(1), Timer()
    with suppress(KeyError), timings.group(timer):
        work(timings, stream, 1000)
        raise KeyError
    work(timings, stream, 1000)
    timings.read()
    assert timer.seconds == 0
