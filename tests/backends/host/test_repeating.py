"""A timer that goes on until it is told to end."""

from __future__ import annotations

import pytest

from dask_p2p.backends.host import RepeatingTimer
from dask_p2p.errors import DeviceLostError
from tests.clock import Timers

INTERVAL_S = 20.0


@pytest.fixture
def timers():
    return Timers()


def test_it_goes_on_until_the_function_says_no(timers):
    results, called_s = [True, True, False, False], []

    def function():
        called_s.append(timers.clock.now_s)
        return results[len(called_s) - 1]

    began_s = timers.clock.now_s
    timer = RepeatingTimer(INTERVAL_S, function, timers.make)
    timer.start()
    timer.start()  # it goes on already
    timers.advance(10 * INTERVAL_S)
    assert called_s == [began_s + n * INTERVAL_S for n in (1, 2, 3)]
    timer.start()
    timers.advance(10 * INTERVAL_S)
    assert called_s[3:] == [began_s + 11 * INTERVAL_S]


def test_one_that_is_cancelled_while_the_function_runs_ends(timers):
    calls = []

    def function():
        calls.append(1)
        timer.cancel()
        return True

    timer = RepeatingTimer(INTERVAL_S, function, timers.make)
    timer.start()
    timers.advance(5 * INTERVAL_S)
    assert calls == [1]


def test_a_lost_device_ends_it_quietly(timers):
    calls = []

    def lost():
        calls.append(1)
        raise DeviceLostError("gone")

    timer = RepeatingTimer(INTERVAL_S, lost, timers.make)
    timer.start()
    timers.advance(5 * INTERVAL_S)
    assert calls == [1]
