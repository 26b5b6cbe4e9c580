from __future__ import annotations

from collections import Counter

import pytest

from dask_p2p.indexed import count_wrong, indexed_array
from dask_p2p.measure import (
    Exchange,
    Runs,
    bandwidth_gbs,
    collect,
    compare,
    dask_rechunk,
    least_bytes,
    measure,
    measure_in_turn,
    p2p_transpose,
    p2p_transpose_in,
    place_blocks,
)
from dask_p2p.registration import workers_of
from tests.support import given_up

SHAPE = (200, 120)
CHUNKS = ((50, 50, 50, 50), (120,))
AXES = (1, 0)


def make():
    return indexed_array(SHAPE, CHUNKS, "f4")


def check(y):
    return int(count_wrong(y, SHAPE, AXES).compute())


def fails(x, axes):
    def fail(block):
        raise RuntimeError("two\nlines") from OSError("the cause\nof it")

    return x.transpose(axes).map_blocks(fail, dtype=x.dtype)


@pytest.fixture
def x(client):
    return place_blocks(client, make)


def test_blocks_are_placed_evenly(client, x):
    held = Counter(holders[0] for holders in client.who_has(x).values())
    assert [*held.values()] == [1, 1, 1, 1]


def test_a_run_that_is_noted_and_checked(client, x):
    steps = []
    runs = measure(client, "ours", p2p_transpose, x, AXES, 2, check, lambda: steps.append(1))
    assert (runs.name, runs.wrong, runs.failed) == ("ours", 0, None)
    assert len(runs.times_s) == len(runs.exchanges) == 2
    assert len(steps) == 3
    assert runs.first_s > 0
    assert min(runs.times_s) <= runs.median_s <= max(runs.times_s)
    assert runs.link_gbs > 0
    for exchange in runs.exchanges:
        # Dask spreads four slabs over four idle workers, most times; the plan knows the rest.
        assert exchange.moved_bytes == exchange.least_bytes
        assert exchange.moved_bytes == sum(exchange.pairs.values())
        assert {transport for _, _, transport in exchange.pairs} == {"cma"}, given_up(client)
        assert all(reader != holder for reader, holder, _ in exchange.pairs)
        assert len(exchange.tasks_s) == 4
        assert 0 < max(exchange.tasks_s) <= exchange.span_s
    for time_s, exchange in zip(runs.times_s, runs.exchanges, strict=True):
        parts_s = (exchange.before_s, exchange.span_s, exchange.after_s)
        assert min(parts_s) > 0
        assert sum(parts_s) == pytest.approx(time_s, abs=0.05)


def test_least_bytes_follow_from_the_places(client, x):
    from distributed import wait

    everywhere = sorted(workers_of(client))
    with_annotation = client.persist(p2p_transpose(x, AXES), workers=everywhere[:1])
    wait(with_annotation)
    # One worker makes all of the result, and holds a quarter of the input.
    assert least_bytes(client, x, with_annotation, AXES) == 3 * 50 * 120 * 4
    client.replicate(x)
    assert least_bytes(client, x, with_annotation, AXES) == 0


@pytest.mark.parametrize("method", ["tasks", "p2p"])
def test_rivals_make_the_same(client, x, method):
    way = dask_rechunk(method)
    assert way(x, AXES).chunks == p2p_transpose(x, AXES).chunks
    runs = measure(client, method, way, x, AXES, 1, check)
    assert (runs.wrong, runs.exchanges, runs.link_gbs) == (0, [], 0.0)


def test_modes_are_other_arrays(client, x):
    sync, again = (p2p_transpose_in("sync")(x, AXES) for _ in range(2))
    assert sync.name == again.name != p2p_transpose_in("async")(x, AXES).name
    ways = {mode: p2p_transpose_in(mode) for mode in ("sync", "async")}
    runs = measure_in_turn(client, ways, x, AXES, 1, check)
    assert [(r.name, r.wrong, len(r.times_s)) for r in runs] == [("sync", 0, 1), ("async", 0, 1)]


def test_one_block_after_the_other(client, x):
    way = {"sync": p2p_transpose_in("sync")}
    (runs,) = measure_in_turn(client, way, x, AXES, 2, check, one_by_one=["sync"])
    assert (runs.wrong, runs.one_by_one) == (0, True)
    for exchange in runs.exchanges:
        assert len(exchange.tasks_s) == 4
        assert exchange.busy_s == pytest.approx(sum(exchange.tasks_s))
        assert exchange.busy_s < exchange.span_s
        assert exchange.moved_bytes == exchange.least_bytes == 3 / 4 * x.nbytes
    with pytest.raises(RuntimeError, match="two"):
        measure_in_turn(client, {"fails": fails}, x, AXES, 1, one_by_one=["fails"])


def test_wrong_results_are_counted(client, x):
    runs = measure(client, "wrong", lambda x, axes: x.transpose(axes) + 1, x, AXES, 1, check)
    assert runs.wrong == 200 * 120


def test_failures(client, x):
    with pytest.raises(RuntimeError, match="two"):
        measure(client, "fails", fails, x, AXES, 1)
    runs = compare(client, {"ours": p2p_transpose}, {"fails": fails}, make, AXES, 1, check)
    assert [r.failed for r in runs] == [None, "OSError: the cause"]
    with pytest.raises(RuntimeError, match="two"):
        compare(client, {"ours": fails}, {}, make, AXES, 1, check)
    with pytest.raises(RuntimeError, match="two"):
        place_blocks(client, lambda: fails(make(), AXES))


def test_nothing_is_collected_of_strangers(client):
    assert collect(client, "no such array") is None


def test_figures():
    assert bandwidth_gbs(1_000_000_000, 0.5) == 4.0
    runs = Runs("one", 2.0, [])
    assert runs.median_s == 2.0
    runs.exchanges = [
        Exchange(1, {}, 1.0, [1.0], rates) for rates in ([3.0, 1.0], [5.0, 2.0], [], [9.0, 4.0])
    ]
    assert runs.link_gbs == 2.0  # the median of the slowest readers
