from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from dask_p2p.transports.budget import ByteBudget


def test_what_all_have_taken_stays_below_the_limit():
    budget = ByteBudget(100)
    first, second = budget.reservation(), budget.reservation()
    assert first.reserve(60)
    assert not second.reserve(50)
    assert second.reserve(40)
    assert budget.reserved_bytes == 100
    first.release(60)
    first.close()
    second.close()
    second.close()
    assert budget.reserved_bytes == 0


def test_who_has_nothing_comes_before_who_wants_more():
    budget = ByteBudget(100)
    first, second = budget.reservation(), budget.reservation()
    assert first.reserve(30)
    assert first.reserve(30)
    assert not first.reserve(30), "a quarter is for others"
    assert second.reserve(30)


@pytest.mark.parametrize("limit_bytes", [1, 7])
def test_something_larger_than_the_limit_is_taken_alone(limit_bytes):
    budget = ByteBudget(limit_bytes)
    first, second = budget.reservation(), budget.reservation()
    assert first.reserve(8)
    assert not second.reserve(8)
    assert not first.reserve(8)
    first.close()
    assert second.reserve(8)


def test_by_many_threads():
    budget = ByteBudget(100)
    seen_bytes = []

    def work():
        for _ in range(300):
            room = budget.reservation()
            if room.reserve(30):
                seen_bytes.append(budget.reserved_bytes)
            room.close()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(seen_bytes) <= 100
    assert budget.reserved_bytes == 0


def test_two_that_look_at_the_same_time():
    both_look = threading.Barrier(2)

    class Watched(ByteBudget):
        @property
        def reserved_bytes(self):
            found_bytes = super().reserved_bytes
            with suppress(threading.BrokenBarrierError):
                both_look.wait(0.2)
            return found_bytes

    budget = Watched(100)
    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(budget.reservation().reserve, 60) for _ in range(2)]
    assert sorted(future.result() for future in taken) == [False, True]
