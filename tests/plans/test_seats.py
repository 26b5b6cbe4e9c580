from __future__ import annotations

from collections import Counter
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.plugins.placement import max_matching, ranks_for, room


@pytest.mark.parametrize(
    ("units", "needs", "count"),
    [
        ({"GPU": 2}, {"GPU": 1}, 2),
        ({"GPU": 1}, {"GPU": 2}, 0),
        ({}, {"GPU": 1}, 0),
        ({"GPU": 1}, {}, inf),
        ({}, {"GPU": 0}, inf),
        ({"GPU": 1}, {"GPU": 0.1}, 10),
        ({"GPU": 0.3}, {"GPU": 0.1}, 3),
        ({"GPU": 4, "memory": 10e9}, {"GPU": 1, "memory": 4e9}, 2),
    ],
)
def test_ranks_of_a_worker(units, needs, count):
    assert room(units, needs) == count


@pytest.mark.parametrize(
    ("threads", "size_bytes", "count"),
    [
        ([], 1000, 1),  # no cluster
        ([4, 4], 0, 2),
        ([4, 4], 79, 6),  # each of 10 bytes
        ([4, 4], 1000, 8),
        ([1, 4], 40, 3),
    ],
)
def test_ranks_for_an_array(threads, size_bytes, count):
    assert ranks_for(threads, size_bytes, 10) == count


workers = st.sets(st.sampled_from("abcd"), max_size=4).map(frozenset)


@given(
    wants=st.lists(workers, max_size=5),
    rooms=st.fixed_dictionaries({worker: st.integers(0, 2) for worker in "abcd"}),
)
def test_as_many_are_seated_as_by_trying_all_ways(wants, rooms):
    max_seats = 0
    for seats in product(*([*sorted(hosts), None] for hosts in wants)):
        used = Counter(seat for seat in seats if seat)
        if all(used[worker] <= rooms[worker] for worker in used):
            max_seats = max(max_seats, used.total())
    assert max_matching(Counter(wants), rooms) == max_seats
