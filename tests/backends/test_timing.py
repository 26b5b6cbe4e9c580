"""Timing by events, on streams that a test moves on."""

from __future__ import annotations

from contextlib import suppress

import pytest

from dask_p2p.backends.timing import MOST_PAIRS, StreamTimings, Timer


class Stream:
    """Whose work so far ends at ``at_ms``."""

    def __init__(self, ptr):
        self.ptr = ptr
        self.at_ms = 0.0


class Event:
    made = 0

    def __init__(self):
        Event.made += 1

    def record(self, stream):
        self.stream, self.at_ms = stream, stream.at_ms


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
    stream, first, second, empty = Stream(1), Timer(), Timer(), Timer()
    with timings.group(first):
        stream.at_ms += 7  # what the stream has to wait for before the work is not counted
        work(timings, stream, 1000)
        work(timings, stream, 500)
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
    assert (first.seconds, second.seconds, empty.seconds) == (3.0, 0.125, 0)
    assert Event.made == 2 * 2


def test_of_many_groups_few_are_timed(timings):
    stream, timer = Stream(1), Timer()
    for number in range(1, 101):
        with timings.group(timer):
            work(timings, stream, 1000 if number < 64 else 7000)
    timings.read()
    assert (timer.groups, timer.timed, Event.made) == (100, 3, 2 * 3)  # 1, 8, 64
    assert timer.seconds == pytest.approx(100 * (2 + 7) / 3)


def test_so_many_pairs_and_no_more(timings):
    stream, timers = Stream(1), [Timer() for _ in range(MOST_PAIRS + 5)]
    for _ in range(2):
        for timer in timers:
            with timings.group(timer):
                work(timings, stream, 1000)
    timings.read()
    assert Event.made == 2 * MOST_PAIRS
    assert [timer.seconds for timer in timers] == [2.0] * MOST_PAIRS + [0.0] * 5


def test_a_block_on_the_host():
    timer = Timer()
    for _ in range(3):
        with timer:
            pass
    assert (timer.groups, timer.timed) == (3, 3)
    assert timer.seconds == timer.timed_s > 0


def test_a_group_that_fails_is_not_timed(timings):
    stream, timer = Stream(1), Timer()
    with suppress(KeyError), timings.group(timer):
        work(timings, stream, 1000)
        raise KeyError
    work(timings, stream, 1000)
    timings.read()
    assert timer.seconds == 0
