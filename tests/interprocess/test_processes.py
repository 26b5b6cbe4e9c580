"""The end of other processes: who is called, when, and how often."""

from __future__ import annotations

import os
import threading

from dask_p2p.transports.process_memory import Processes, own_name
from tests.support import BOUND_S
from tests.transports.loopback import wait_until


def test_this_process_has_one_name():
    assert own_name() == own_name()
    assert own_name().startswith(f"{os.getpid()}-")


def test_the_end_of_a_process_is_found_once(sleeper):
    processes, names, threads = Processes(), [], []

    def note_thread(name):
        threads.append(threading.current_thread())

    for on_end in (names.append, note_thread, names.append):
        processes.watch("sleeper", sleeper.pid, on_end)
    processes.watch("own", os.getpid(), names.append)
    assert not processes.has_ended("sleeper")
    sleeper.kill()  # nobody has waited for it yet: it is a zombie
    wait_until(lambda: names and threads, BOUND_S)
    assert processes.has_ended("sleeper")
    assert not processes.has_ended("own")
    assert (names, len(threads)) == (["sleeper"], 1)
    assert threading.current_thread() not in threads


def test_none_of_the_last_waits_for_another(sleeper):
    processes, go_on, names = Processes(), threading.Event(), []
    processes.watch("sleeper", sleeper.pid, lambda name: go_on.wait(2 * BOUND_S), last=True)
    processes.watch("sleeper", sleeper.pid, names.append, last=True)
    sleeper.kill()
    wait_until(lambda: names, BOUND_S)
    go_on.set()


def test_a_call_that_fails_is_logged_and_others_follow(sleeper, caplog):
    processes, names = Processes(), []
    processes.watch("sleeper", sleeper.pid, lambda name: 1 / 0)
    processes.watch("sleeper", sleeper.pid, names.append)
    sleeper.kill()
    wait_until(lambda: names, BOUND_S)
    assert "the end of process sleeper" in caplog.text


def test_a_process_that_has_ended_before(sleeper):
    sleeper.kill()
    sleeper.wait()
    processes, names = Processes(), []
    processes.watch("sleeper", sleeper.pid, names.append)
    assert processes.has_ended("sleeper")
    wait_until(lambda: names == ["sleeper"], BOUND_S)


def test_what_is_forgotten_is_not_called(sleeper):
    processes, names, forgotten_names = Processes(), [], []
    processes.watch("sleeper", sleeper.pid, forgotten_names.append)
    processes.watch("sleeper", sleeper.pid, names.append)
    processes.forget("sleeper", forgotten_names.append)
    processes.forget("nobody", forgotten_names.append)
    sleeper.kill()
    wait_until(lambda: names, BOUND_S)
    assert forgotten_names == []


def test_a_kernel_that_watches_nothing(monkeypatch):
    def refuse(pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    processes, names = Processes(), []
    processes.watch("other", 1, names.append)
    assert not processes.has_ended("other")
    assert names == []
