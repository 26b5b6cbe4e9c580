"""The end of other processes: who is called, when, and how often."""

from __future__ import annotations

import os
import threading

from dask_p2p.transports.process_memory import Processes, own_name
from tests.support import BOUND_S
from tests.transports.loopback import wait_until


class Calls:
    def __init__(self):
        self.names, self.threads = [], []

    def __call__(self, name):
        self.names.append(name)
        self.threads.append(threading.current_thread())


def test_this_process_has_one_name():
    assert own_name() == own_name()
    assert own_name().startswith(f"{os.getpid()}-")


def test_the_end_of_a_process_is_found_once(sleeper):
    processes, calls, later_calls = Processes(), Calls(), Calls()
    for on_end in (calls, later_calls, calls):
        processes.watch("sleeper", sleeper.pid, on_end)
    processes.watch("own", os.getpid(), calls)
    assert not processes.has_ended("sleeper")
    sleeper.kill()  # nobody has waited for it yet: it is a zombie
    wait_until(lambda: calls.names and later_calls.names, BOUND_S)
    assert processes.has_ended("sleeper")
    assert not processes.has_ended("own")
    assert calls.names == later_calls.names == ["sleeper"]
    assert threading.current_thread() not in calls.threads + later_calls.threads


def test_none_of_the_last_waits_for_another(sleeper):
    processes, go_on, calls = Processes(), threading.Event(), Calls()
    processes.watch("sleeper", sleeper.pid, lambda name: go_on.wait(2 * BOUND_S), last=True)
    processes.watch("sleeper", sleeper.pid, calls, last=True)
    sleeper.kill()
    wait_until(lambda: calls.names, BOUND_S)
    go_on.set()


def test_a_call_that_fails_is_logged_and_others_follow(sleeper, caplog):
    processes, calls = Processes(), Calls()
    processes.watch("sleeper", sleeper.pid, lambda name: 1 / 0)
    processes.watch("sleeper", sleeper.pid, calls)
    sleeper.kill()
    wait_until(lambda: calls.names, BOUND_S)
    assert "the end of process sleeper" in caplog.text


def test_a_process_that_has_ended_before(sleeper):
    sleeper.kill()
    sleeper.wait()
    processes, calls = Processes(), Calls()
    processes.watch("sleeper", sleeper.pid, calls)
    assert processes.has_ended("sleeper")
    wait_until(lambda: calls.names == ["sleeper"], BOUND_S)


def test_what_is_forgotten_is_not_called(sleeper):
    processes, calls, kept_calls = Processes(), Calls(), Calls()
    processes.watch("sleeper", sleeper.pid, calls)
    processes.watch("sleeper", sleeper.pid, kept_calls)
    processes.forget("sleeper", calls)
    processes.forget("nobody", calls)
    sleeper.kill()
    wait_until(lambda: kept_calls.names, BOUND_S)
    assert calls.names == []


def test_a_kernel_that_watches_nothing(monkeypatch):
    def refuse(pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    processes, calls = Processes(), Calls()
    processes.watch("other", 1, calls)
    assert not processes.has_ended("other")
    assert calls.names == []
