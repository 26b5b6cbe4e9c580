from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from dask_p2p.transports.budget import Budget


def test_what_all_have_taken_stays_below_the_limit():
    budget = Budget(100)
    first, second = budget.room(), budget.room()
    assert first.take(60)
    assert not second.take(50)
    assert second.take(40)
    assert budget.taken_bytes == 100
    first.give_back(60)
    first.close()
    second.close()
    second.close()
    assert budget.taken_bytes == 0


def test_who_has_nothing_comes_before_who_wants_more():
    budget = Budget(100)
    first, second = budget.room(), budget.room()
    assert first.take(30)
    assert first.take(30)
    assert not first.take(30), "a quarter is for others"
    assert second.take(30)


@pytest.mark.parametrize("limit_bytes", [1, 7])
def test_something_larger_than_the_limit_is_taken_alone(limit_bytes):
    budget = Budget(limit_bytes)
    first, second = budget.room(), budget.room()
    assert first.take(8)
    assert not second.take(8)
    assert not first.take(8)
    first.close()
    assert second.take(8)


def test_by_many_threads():
    budget = Budget(100)
    seen_bytes = []

    def work():
        for _ in range(300):
            room = budget.room()
            if room.take(30):
                seen_bytes.append(budget.taken_bytes)
            room.close()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(seen_bytes) <= 100
    assert budget.taken_bytes == 0


def test_two_that_look_at_the_same_time():
    both_look = threading.Barrier(2)

    class Watched(Budget):
        @property
        def taken_bytes(self):
            found_bytes = super().taken_bytes
            with suppress(threading.BrokenBarrierError):
                both_look.wait(0.2)
            return found_bytes

    budget = Watched(100)
    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(budget.room().take, 60) for _ in range(2)]
    assert sorted(future.result() for future in taken) == [False, True]
