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


@pytest.mark.parametrize("end", ["it is cancelled meanwhile", "the device is lost"])
def test_it_ends_while_the_function_runs(timers, end):
    calls = []

    def function():
        calls.append(1)
        if end == "the device is lost":
            raise DeviceLostError("gone")
        timer.cancel()
        return True

    timer = RepeatingTimer(INTERVAL_S, function, timers.make)
    timer.start()
    timers.advance(5 * INTERVAL_S)
    assert calls == [1]
