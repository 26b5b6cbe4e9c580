from __future__ import annotations

import dask.array as da
import pytest
from distributed import wait

import dask_p2p
from benchmarks import sections_calls
from dask_p2p.monitoring.runs import fetch_records
from dask_p2p.plans.orders import ORDERS


def test_what_fails_is_told_and_the_rest_goes_on(capsys):
    def fails():
        raise RuntimeError("no memory")

    assert sections_calls.attempt("512 JAX", fails) is None
    assert capsys.readouterr().out == "512 JAX failed: RuntimeError: no memory\n"


def test_transposes_that_are_wrong_are_told(monkeypatch, capsys, client):
    """By members and by the layer."""
    monkeypatch.setattr(sections_calls, "count_wrong", lambda *args: da.ones(3).sum())
    assert sections_calls.transposes_of(client, 16, 1, False, 30) == {}
    assert capsys.readouterr().out.count("3.0 elements are wrong") == 1 + len(ORDERS)


def test_each_call_of_a_layer_is_computed(client):
    x = client.persist(da.ones((64, 64), chunks=(16, 64)))
    y = dask_p2p.transpose(x)
    assert all(sections_calls.computed(y, 30) > 0 for _ in range(10))
    made = [each for each in client.sync(fetch_records, client) if each.name == y.name]
    assert len(made) == 10 * 4


def test_what_is_not_gone_is_told(client):
    y = client.persist(da.ones(4))
    wait(y)
    with pytest.raises(TimeoutError, match="still there"):
        sections_calls.wait_until_gone(y.name, 0.1)


def test_transforms_that_do_not_come_back_are_told(monkeypatch, capsys, client):
    monkeypatch.setattr(sections_calls, "_TOLERANCE", 0)
    assert sections_calls.transforms_of(client, (8, 8, 8), 1, False, 30) == {}
    assert capsys.readouterr().out.count("after a round trip") == 4


def test_four_workers_transform_slabs_and_pencils(client):
    found = sections_calls.transforms_of(client, (8, 12, 6), 1, False, 30)
    assert found.keys() == {
        "Context.fftn",
        "Context.rfftn",
        *(f"{way}, {sections_calls.PENCILS}" for way in sections_calls.REAL),
    }
