"""Numbers that `iterate` records while it runs, and ends on."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Record, Whole, iterate
from dask_p2p.errors import BlockMismatchError, InputError, MemoryLimitError
from tests.sections.iterate.test_coupled import U, V, array, both, inner, laplacian, react
from tests.support import mostly_slow

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
RANKS = [1, 2, 3, 4]
NAMED = {"u": array(U)}


def roughness(u):
    """The largest Laplacian: it reads the halo after the step."""
    return abs(laplacian(u)).max()


def row_sums(v, at):
    """The sums of all rows of the whole array, each rank's own part of them."""
    sums = np.zeros(at.shape[0])
    sums[slice(*at.box[0])] = inner(v).sum(1)
    return sums


RECORD = {
    "rough": Record(roughness, every=3, op="max"),
    "mass": lambda u: inner(u).sum(),
    "rows": Record(row_sums, every=2, shape=(24,)),
    "least": Record(lambda u, v: min(inner(u).min(), inner(v).min()), op="min"),
    "cells": Record(lambda u: inner(u).size, dtype=int),
    "number": Record(lambda at: at.step if at.rank == 0 else 0, dtype=int),
}


def wanted_series(u, v, steps):
    series = {name: [] for name in RECORD}
    for step in range(1, steps + 1):
        new = both({"u": u, "v": v}, 1, 1, [(react, "uv")])
        u, v = new["u"], new["v"]
        series["mass"].append(u.sum())
        if step % 3 == 0:
            series["rough"].append(abs(laplacian(np.pad(u, 1, "wrap"))).max())
        if step % 2 == 0:
            series["rows"].append(v.sum(1))
        series["least"].append(min(u.min(), v.min()))
        series["cells"].append(u.size)
        series["number"].append(step - 1)
    return series, {"u": u, "v": v}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", mostly_slow(RANKS, [1, 4]))
@pytest.mark.parametrize("steps", [5, 140])  # less and more than a batch
def test_series(client, steps, ranks, overlap):
    u, v = abs(U) / 4, abs(V) / 4
    options = {"record": RECORD, "ranks": ranks, "overlap": overlap}
    lazy_result = iterate(react, {"u": array(u), "v": array(v)}, 1, steps, **options)
    assert [*lazy_result] == ["u", "v", *RECORD, "steps"]
    (result,) = dask.compute(lazy_result)
    series, fields = wanted_series(u, v, steps)
    assert result["steps"] == steps
    for name in ("u", "v"):
        assert np.array_equal(result[name], fields[name])
    for name, values in series.items():
        assert result[name].shape == np.shape(values)
        np.testing.assert_allclose(result[name], values, rtol=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
def test_until_reads_the_newest_records(client, ranks):
    records_seen = []

    def ends(last):
        records_seen.append(last)
        return last["mass"] < 200 and last.get("steps_done", 0) >= 8

    record = {
        "mass": lambda u, weight: weight * u.sum(),  # a keyword that no other function reads
        "steps_done": Record(lambda at: at.step + 1, every=4, op="max", dtype=int),
    }
    fields = {"u": array(np.ones((24, 20)))}
    options = {"record": record, "until": ends, "ranks": ranks, "weight": 2}
    (result,) = dask.compute(iterate(lambda u: u * 0.7, fields, 0, 50, **options))
    assert result["steps"] == 8
    assert np.allclose(result["u"], 0.7**8)
    assert result["mass"].shape == (50,)
    np.testing.assert_allclose(result["mass"][:8], 960 * 0.7 ** np.arange(1, 9))
    assert np.isnan(result["mass"][8:]).all()
    assert result["steps_done"].tolist() == [4, 8] + [0] * 10


def test_series_that_do_not_fit_into_memory_are_refused(client):
    """A large number of steps is a usual way to run until a condition holds."""
    record = {"mass": lambda u: u.sum()}
    options = {"record": record, "until": lambda last: True, "ranks": 2}
    lazy_result = iterate(lambda u: u, NAMED, 0, 10**13, **options)
    with pytest.raises(MemoryLimitError, match=r"series of records.*fewer steps, or Record\("):
        lazy_result["u"].compute()
    rarely = {"mass": Record(record["mass"], every=10**9)}
    options = {"record": rarely, "max_time": "0.1 s", "ranks": 2}
    (result,) = dask.compute(iterate(lambda u: u, NAMED, 0, 10**13, **options))
    assert result["mass"].shape == (10**4,)
    assert np.isnan(result["mass"]).all()


def test_wrong_values_are_named(client):
    for function, message in (
        (lambda u: u, r"a value of shape \(\)"),
        (lambda u: 1j, "becomes float64"),
        (lambda u: None, "object"),
    ):
        lazy_result = iterate(lambda u: u, {"u": array(U)}, 0, 2, record={"r": function}, ranks=2)
        with pytest.raises(BlockMismatchError, match=message):
            lazy_result["u"].compute()


def test_wrong_arguments_are_refused():
    def refused(message, record, fields=NAMED):
        with pytest.raises(InputError, match=message):
            iterate(lambda u: u, fields, 0, 2, record=record)

    refused("names that no field has", {"u": lambda u: 0})
    refused("names that no field has", {"steps": lambda u: 0})
    refused("got parameter 'w'", {"r": lambda w: 0})
    refused("without a parameter out", {"r": lambda out: 0})
    refused("expected one of sum, .* got 'mean'", {"r": Record(lambda u: 0, op="mean")})
    refused("steps between records", {"r": Record(lambda u: 0, every=0)})
    refused("fields by name", {"r": lambda u: 0}, array(U))
    refused("name of a parameter for a record", {"a b": lambda u: 0})


@pytest.mark.parametrize("op", ["sum", "prod", "max"])
def test_values_that_all_ranks_have_count_once(client, op):
    constants = {"table": Whole(da.arange(4, chunks=2)), "factor": 3.0}
    functions = {"times": lambda t: t, "product": lambda table, factor: table.sum() * factor}
    record = {name: Record(function, op=op) for name, function in functions.items()}
    lazy_result = iterate(
        lambda u, t: {"t": t + 1},
        {**NAMED, "t": 0.0},
        0,
        2,
        ranks=3,
        constants=constants,
        record=record,
    )
    (result,) = dask.compute(lazy_result)
    assert result["product"].tolist() == [18, 18]
    assert result["times"].tolist() == [1, 2]
