from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from dask_p2p.backends.host import IdentityCache
from tests.support import BOUND_S


class Computed:
    """Results, and the keys for which they were computed."""

    def __init__(self, **options):
        self.results, self.keys = IdentityCache(**options), []

    def __call__(self, instance, key):
        return self.results.get(instance, key, lambda: self.keys.append(key) or [*instance])


def test_few_results_are_kept():
    computed, pieces = Computed(max_size=2), []
    for _ in range(2):
        for key in range(3):
            computed(pieces, key)
    assert computed.keys == [0, 1, 2, 0, 1, 2]


def test_a_result_of_two_threads_counts_once():
    results, pieces, barrier = IdentityCache(max_size=2), [], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(results.get, pieces, "a", lambda: barrier.wait(BOUND_S))
    first = results.get(pieces, "a", object)
    results.get(pieces, "b", object)
    assert results.get(pieces, "a", object) is first
