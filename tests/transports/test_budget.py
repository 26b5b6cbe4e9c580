from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from dask_p2p.transports.budget import ByteBudget


def test_what_all_have_taken_stays_below_the_limit():
    budget = ByteBudget(100)
    first, second = budget.reserve(40, 20)
    assert budget.reserve(50) is None
    (third,) = budget.reserve(40)
    assert budget.reserved_bytes == 100
    second()
    assert budget.reserved_bytes == 80
    for reserved in (first, third, third):
        reserved()
    assert budget.reserved_bytes == 0


def test_a_request_gets_all_that_it_wants_or_nothing():
    """So none waits that holds something another one waits for."""
    budget = ByteBudget(100)
    (first,) = budget.reserve(60)
    assert budget.reserve(20, 20, 20) is None
    assert budget.reserved_bytes == 60
    first()
    assert len(budget.reserve(20, 20, 20)) == 3


@pytest.mark.parametrize("limit_bytes", [1, 7])
def test_something_larger_than_the_limit_is_taken_alone(limit_bytes):
    budget = ByteBudget(limit_bytes)
    (first,) = budget.reserve(8)
    assert budget.reserve(8) is None
    first()
    assert budget.reserve(8)


def test_by_many_threads():
    budget = ByteBudget(100)
    seen_bytes = []

    def work():
        for _ in range(300):
            for reserved in budget.reserve(10, 20) or ():
                seen_bytes.append(budget.reserved_bytes)
                reserved()

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
        taken = [threads.submit(budget.reserve, 60) for _ in range(2)]
    assert sorted(bool(future.result()) for future in taken) == [False, True]
