from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from dask_p2p.backends.host import KeptResults
from tests.support import BOUND_S


class Computed:
    """Results, and the keys for which they were computed."""

    def __init__(self, **options):
        self.results, self.keys = KeptResults(**options), []

    def __call__(self, known, key):
        return self.results.of(known, key, lambda: self.keys.append(key) or [*known])


def test_few_results_are_kept():
    computed, pieces = Computed(most=2), []
    for _ in range(2):
        for key in range(3):
            computed(pieces, key)
    assert computed.keys == [0, 1, 2, 0, 1, 2]


def test_a_result_of_two_threads_counts_once():
    results, pieces, both = KeptResults(most=2), [], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(results.of, pieces, "a", lambda: both.wait(BOUND_S))
    first = results.of(pieces, "a", object)
    results.of(pieces, "b", object)
    assert results.of(pieces, "a", object) is first
