from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from distributed import LocalCluster, secede

from dask_p2p.plugins.dask_internals import only_waiting
from tests.support import BOUND_S
from tests.transports.loopback import wait_until

TASKS = 20


@pytest.fixture
def cluster():
    """A worker in this process, of which no other test has used the threads."""
    threads = {"threads_per_worker": 1, "processes": False}
    with LocalCluster(n_workers=1, **threads, dashboard_address=":0") as cluster:
        yield cluster


class Seen:
    """What tasks of the worker in this process have noted."""

    turn = threading.Lock()
    at_work = 0
    together: ClassVar[list[int]] = []
    begun: ClassVar[list[int]] = []
    threads: ClassVar[set[threading.Thread]] = set()
    failed: ClassVar[set[threading.Thread]] = set()


def work(number):
    Seen.at_work += 1
    Seen.together.append(Seen.at_work)
    Seen.begun.append(number)
    Seen.threads.add(threading.current_thread())
    time.sleep(0.005)
    Seen.at_work -= 1
    with Seen.turn, only_waiting():
        wait_until(lambda: Seen.begun[-1] != number or len(Seen.begun) == TASKS)  # the next begins
    return number


def note_thread(number):
    Seen.threads.add(threading.current_thread())


def test_the_next_task_begins_and_threads_are_used_again(client):
    assert client.gather(client.map(work, range(TASKS))) == list(range(TASKS))
    assert max(Seen.together) == 1, "one at a time works, whoever waits"
    assert len(Seen.threads) == 2
    client.gather(client.map(note_thread, range(TASKS)))
    assert len(Seen.threads) == 2, "tasks that come later find these"


def test_a_task_that_fails_while_it_waits_comes_back_too(client):
    def fails():
        Seen.failed.add(threading.current_thread())
        with only_waiting():
            raise KeyError("of the device")

    for _ in range(5):
        with pytest.raises(KeyError):
            client.submit(fails, pure=False).result(timeout=BOUND_S)
    assert len(Seen.failed) <= 2


def test_a_thread_that_has_left_the_pool_just_waits(client):
    def leave_pool():
        secede()
        with only_waiting():
            return "done"

    assert client.submit(leave_pool).result(timeout=BOUND_S) == "done"


def test_on_a_thread_that_is_not_dasks_nothing_else_begins():
    def wait():
        with only_waiting():
            return "done"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(wait).result() == "done"
