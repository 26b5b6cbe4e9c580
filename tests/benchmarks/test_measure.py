from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from distributed import wait

from benchmarks import moved
from benchmarks.measure import (
    Case,
    Way,
    compare,
    dask_rechunk,
    no_op,
    p2p_with,
    place_blocks,
)
from benchmarks.moved import collect, least_bytes
from dask_p2p.plugins.registration import workers_of
from tests.support import given_up

CASE = Case((200, 120), ((50, 50, 50, 50), (120,)), (1, 0), np.dtype("f4"))
OURS = Way(p2p_with({}), required=True)


def fails(x, axes):
    def fail(block):
        raise RuntimeError("two\nlines") from OSError("the cause\nof it")

    return x.transpose(axes).map_blocks(fail, dtype=x.dtype)


def fails_after(times):
    calls = []

    def way(x, axes):
        calls.append(1)
        return OURS.transpose(x, axes) if len(calls) <= times else fails(x, axes)

    return way


def one_by_one(mode="sync"):
    return Way(p2p_with({"p2p.mode": mode}), one_by_one=True, required=True)


@pytest.mark.parametrize("blocks", [4, 8, 10])
def test_neighbouring_blocks_are_on_one_worker(client, blocks):
    case = replace(CASE, chunks=((200 // blocks,) * blocks, (120,)))
    x = place_blocks(client, case.make)
    who_has = client.who_has(x)
    holders = [who_has[x.name, row, 0][0] for row in range(blocks)]
    assert max(Counter(holders).values()) - min(Counter(holders).values()) <= 1
    assert holders == sorted(holders)
    assert set(holders) == set(workers_of(client))


def test_a_run_that_is_noted_and_checked(client):
    steps = []
    (row,) = compare(client, {"ours": OURS}, CASE, 2, lambda: steps.append(1))
    assert (row["way"], row["wrong"], row["one_by_one"]) == ("ours", 0, False)
    assert "failed" not in row
    assert len(row["times_s"]) == 2
    assert len(steps) == 3
    assert row["first_s"] > 0
    assert min(row["times_s"]) <= row["median_s"] <= max(row["times_s"])
    assert row["bandwidth_gbs"] == pytest.approx(2 * 200 * 120 * 4 / row["median_s"] / 1e9)
    assert row["link_gbs"] > 0
    # Dask spreads four slabs over four idle workers, most times; the plan knows the rest.
    assert row["moved_bytes"] == row["least_bytes"]
    assert row["moved_bytes"] == sum(pair["bytes"] for pair in row["pairs"])
    assert {pair["transport"] for pair in row["pairs"]} == {"cma"}, given_up(client)
    assert all(pair["reader"] != pair["holder"] for pair in row["pairs"])
    for run, time_s in enumerate(row["times_s"]):
        parts_s = [row[part][run] for part in ("before_s", "span_s", "after_s")]
        assert min(parts_s) > 0
        assert sum(parts_s) == pytest.approx(time_s, abs=0.05)
        assert 0 < row["exchange_s"][run] <= row["span_s"][run]
        assert row["exchange_s"][run] <= row["tasks_s"][run]


def test_least_bytes_follow_from_the_places(client):
    x = place_blocks(client, CASE.make)
    everywhere = sorted(workers_of(client))
    y = client.persist(OURS.transpose(x, CASE.axes), workers=everywhere[:1])
    wait(y)
    # One worker makes all of the result, and holds a quarter of the input.
    assert least_bytes(client, x, CASE.plan(y), y) == 3 * 50 * 120 * 4
    # Wherever its blocks were made, each worker would lack three quarters of each.
    assert least_bytes(client, x, CASE.plan(y)) == 3 / 4 * CASE.size_bytes
    client.amm.stop()  # it would drop the replicas again, every two seconds
    client.replicate(x)
    assert least_bytes(client, x, CASE.plan(y)) == 0
    assert least_bytes(client, x, CASE.plan(y), y) == 0
    client.amm.start()


@pytest.mark.parametrize("method", ["tasks", "p2p"])
def test_rivals_make_the_same(client, method):
    way = dask_rechunk(method)
    x = CASE.make()
    assert way(x, CASE.axes).chunks == OURS.transpose(x, CASE.axes).chunks
    (row,) = compare(client, {method: Way(way, apart=True)}, CASE, 1)
    assert (row["wrong"], row["link_gbs"]) == (0, 0.0)
    assert "pairs" not in row


def test_a_layer_that_does_nothing(client):
    assert no_op(CASE.make(), CASE.axes).npartitions == 4
    (row,) = compare(client, {"nothing": Way(no_op, checked=False)}, CASE, 1)
    assert row["wrong"] is None
    assert row["median_s"] > 0


def test_modes_are_other_arrays(client):
    x = CASE.make()
    ways = {mode: Way(p2p_with({"p2p.mode": mode})) for mode in ("sync", "async")}
    names = {mode: way.transpose(x, CASE.axes).name for mode, way in ways.items()}
    assert names["sync"] == ways["sync"].transpose(x, CASE.axes).name != names["async"]
    rows = compare(client, ways, CASE, 1)
    assert [(row["way"], row["wrong"]) for row in rows] == [("sync", 0), ("async", 0)]


def test_ways_are_run_in_turn_and_rivals_on_arrays_of_their_own(client):
    ran = []

    def noting(name):
        def way(x, axes):
            ran.append((name, id(x)))
            return x.transpose(axes)

        return way

    ways = {name: Way(noting(name), apart=name == "rival") for name in ("one", "rival", "two")}
    compare(client, ways, CASE, 1)
    assert [name for name, _ in ran] == ["one", "two", "one", "two", "rival", "rival"]
    assert len({array for name, array in ran if name != "rival"}) == 1


def test_arrays_that_are_made_anew_for_each_run(client):
    ran, copies = [], []

    def copying(x, axes):  # as Dask's tasks may
        copies.append(sum(map(len, client.who_has(x).values())))
        ran.append("copying")
        client.replicate(x)
        return x.transpose(axes)

    def other(x, axes):
        ran.append("other")
        return x.transpose(axes)

    ways = {"copying": Way(copying, apart=True), "other": Way(other)}
    rows = compare(client, ways, CASE, 2, anew=True)
    assert ran == ["copying", "other"] * 3
    assert copies == [4, 4, 4]
    for row in rows:
        assert (row["wrong"], len(row["cpu_s"]), len(row["times_s"])) == (0, 2, 2)
        assert min(row["cpu_s"]) > 0


def test_neighbours_along_all_axes_are_on_one_worker(client):
    case = replace(CASE, chunks=((200,), (30,) * 4))
    x = place_blocks(client, case.make)
    who_has = client.who_has(x)
    holders = [who_has[x.name, 0, column][0] for column in range(4)]
    assert holders == sorted(workers_of(client))


def test_one_block_after_the_other(client):
    (row,) = compare(client, {"sync": one_by_one()}, CASE, 2)
    assert (row["wrong"], row["one_by_one"]) == (0, True)
    for tasks_s, span_s, exchange_s in zip(
        row["tasks_s"], row["span_s"], row["exchange_s"], strict=True
    ):
        assert exchange_s < tasks_s < span_s  # none while another ran
    assert row["moved_bytes"] == row["least_bytes"] == 3 / 4 * CASE.size_bytes
    with pytest.raises(RuntimeError, match="two"):
        compare(client, {"fails": replace(one_by_one(), transpose=fails)}, CASE, 1)


def test_wrong_results_are_counted(client):
    (row,) = compare(client, {"wrong": Way(lambda x, axes: x.transpose(axes) + 1)}, CASE, 1)
    assert row["wrong"] == 200 * 120


def test_failures(client):
    ways = {
        "ours": OURS,
        "fails": Way(fails),
        "fails later": Way(fails_after(1)),
        "rival": Way(fails, apart=True),
    }
    steps = []
    ours, *others = compare(client, ways, CASE, 2, lambda: steps.append(1))
    assert (ours["wrong"], len(ours["times_s"])) == (0, 2)
    for row in others:
        assert row["failed"] == "OSError: the cause"
        assert "median_s" not in row
    assert len(steps) == 4 * 3
    with pytest.raises(RuntimeError, match="two"):
        compare(client, {"ours": replace(OURS, transpose=fails)}, CASE, 1)
    with pytest.raises(RuntimeError, match="two"):
        place_blocks(client, lambda: fails(CASE.make(), CASE.axes))


def test_nothing_is_collected_of_strangers(client):
    assert collect(client, "no such array") is None


def test_the_slowest_reader_counts(client, monkeypatch):
    rates_gbs = iter([[3.0, 1.0], [5.0, 2.0], [], [9.0, 4.0]])
    monkeypatch.setattr(moved, "link_gbs", lambda run: next(rates_gbs))
    (row,) = compare(client, {"ours": OURS}, CASE, 4)
    assert row["link_gbs"] == 2.0  # the median of the slowest readers
