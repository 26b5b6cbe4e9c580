"""Names and choice of workers."""

from __future__ import annotations

from collections import Counter

from dask_p2p.monitoring.charts import MOST_WORKERS, as_columns, busiest, short_names


def test_names_are_short_where_that_is_unique():
    assert short_names(["tcp://h:1", "tcp://h:2"]) == {"tcp://h:1": "h:1", "tcp://h:2": "h:2"}
    mixed = ["tcp://h:1", "ucxx://h:1"]
    assert short_names(mixed) == {name: name for name in mixed}
    assert short_names(["inproc://10.0.0.1/7/1", "b"]) == {
        "inproc://10.0.0.1/7/1": "10.0.0.1/7/1",
        "b": "b",
    }
    assert short_names([]) == {}


def test_workers_come_in_the_order_of_their_numbers():
    moved = Counter({"h:1000": 1, "h:999": 2, "g²:5": 0})
    assert busiest(moved) == (["g²:5", "h:999", "h:1000"], "")


def test_of_many_workers_the_busiest_are_shown():
    moved = Counter({f"w{i}": i for i in range(200)})
    shown, note = busiest(moved)
    assert shown == [f"w{i}" for i in range(200 - MOST_WORKERS, 200)]
    assert note == ": the busiest 64 of 200 workers"


def test_columns_are_there_without_rows():
    assert as_columns([], ("a", "b")) == {"a": [], "b": []}
    assert as_columns([(1, 2), (3, 4)], ("a", "b")) == {"a": [1, 3], "b": [2, 4]}
