"""A timer that goes on until it is told to end."""

from __future__ import annotations

import threading
import time

import numpy as np

from dask_p2p.backends.repeating import RepeatingTimer
from dask_p2p.errors import DeviceLostError
from tests.transports.loopback import wait_until

INTERVAL_S = 0.02


def test_it_goes_on_until_the_function_says_no():
    answers = [True, True, False]
    called_s, threads = [time.monotonic()], []

    def function():
        called_s.append(time.monotonic())
        threads.append(threading.current_thread())
        return answers[len(threads) - 1]

    timer = RepeatingTimer(INTERVAL_S, function)
    timer.start()
    timer.start()  # it goes on already
    wait_until(lambda: len(threads) == 3, 5)
    time.sleep(5 * INTERVAL_S)
    assert len(threads) == 3
    assert min(np.diff(called_s)) >= 0.9 * INTERVAL_S
    assert all(thread.daemon for thread in threads), "a process that ends does not wait for it"
    answers.append(False)
    timer.start()
    wait_until(lambda: len(threads) == 4, 5)


def test_it_can_be_ended_and_begun_again():
    called = []
    timer = RepeatingTimer(10 * INTERVAL_S, lambda: called.append(1) or False)
    timer.cancel()
    timer.start()
    timer.cancel()
    time.sleep(20 * INTERVAL_S)
    assert called == []
    timer.start()
    wait_until(lambda: called, 5)


def test_one_that_is_started_while_the_function_runs_goes_on():
    """What it is started for may have come too late for the call that runs."""
    called = []

    def function():
        called.append(1)
        if len(called) == 1:
            timer.start()
        return False

    timer = RepeatingTimer(INTERVAL_S, function)
    timer.start()
    wait_until(lambda: len(called) == 2, 5)


def test_a_lost_device_ends_it_quietly(monkeypatch):
    errors, called = [], []
    monkeypatch.setattr(threading, "excepthook", errors.append)

    def lost():
        called.append(1)
        raise DeviceLostError("gone")

    timer = RepeatingTimer(INTERVAL_S, lost)
    timer.start()
    wait_until(lambda: called, 5)
    time.sleep(5 * INTERVAL_S)
    assert (called, errors) == ([1], [])
