from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

from dask_p2p.backends.kept_results import KeptResults
from tests.support import BOUND_S


class Computed:
    """Results, and the keys for which they were computed."""

    def __init__(self, **options):
        self.results, self.keys = KeptResults(**options), []

    def __call__(self, known, key):
        return self.results.of(known, key, lambda: self.keys.append(key) or [*known])


def test_a_result_is_computed_once_for_an_object_and_a_key():
    computed = Computed()
    pieces, equal = [1, 2], [1, 2]
    first = computed(pieces, "f8")
    assert computed(pieces, "f8") is first
    assert computed(pieces, "i4") is not first
    assert computed(equal, "f8") is not first, "equal objects may differ: 0.0 and -0.0 are equal"
    assert computed.keys == ["f8", "i4", "f8"]


def test_new_objects_do_not_get_the_results_of_others():
    """Without a reference, a new object would have the identity of the one before."""
    computed = Computed()
    for number in range(100):
        assert computed([number], "") == [number]
        gc.collect()


def test_few_results_are_kept():
    computed, pieces = Computed(most=2), []
    for _ in range(2):
        for key in range(3):
            computed(pieces, key)
    assert computed.keys == [0, 1, 2, 0, 1, 2]


def test_large_results_leave_room_for_fewer():
    computed, large, small = Computed(most=3, size=len), [1, 2], [1]
    for _ in range(2):
        computed(large, 0)
        computed(small, 0)
    assert computed.keys == [0, 0]
    computed(small, 1)
    computed(large, 0)
    assert computed.keys == [0, 0, 1, 0]


def test_a_result_of_two_threads_counts_once():
    results, pieces, both = KeptResults(most=2), [], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(results.of, pieces, "a", lambda: both.wait(BOUND_S))
    first = results.of(pieces, "a", object)
    results.of(pieces, "b", object)
    assert results.of(pieces, "a", object) is first
