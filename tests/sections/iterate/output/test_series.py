"""Numbers that `iterate` records while it runs, and ends on."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from dask_p2p import Record, estimate, iterate
from dask_p2p.errors import BlockMismatchError, InputError, MemoryLimitError
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.gang.checkpoints import GENERATIONS
from dask_p2p.sections.iterate.output.series import Series, checked_series
from tests.sections.iterate.test_coupled import U, V, array, both, inner, laplacian, react
from tests.sections.support import nothing_is_left
from tests.support import die_once, mostly_slow, result_of

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
RANKS = [1, 2, 3, 4]
NAMED = {"u": array(U)}


def roughness(u):
    """The largest Laplacian: it reads the halo after the step."""
    return abs(laplacian(u)).max()


def row_sums(v, at):
    """The sums of all rows of the whole array, each rank's own part of them."""
    found = np.zeros(at.shape[0])
    found[slice(*at.box[0])] = inner(v).sum(1)
    return found


RECORD = {
    "mass": lambda u: inner(u).sum(),
    "rough": Record(roughness, every=3, op="max"),
    "rows": Record(row_sums, every=2, shape=(24,)),
    "least": Record(lambda u, v: min(inner(u).min(), inner(v).min()), op="min"),
    "cells": Record(lambda u: inner(u).size, dtype=int),
    "number": Record(lambda at: at.step if at.rank == 0 else 0, dtype=int),
}


def wanted_series(u, v, steps):
    found = {name: [] for name in RECORD}
    for step in range(1, steps + 1):
        new = both({"u": u, "v": v}, 1, 1, [(react, "uv")])
        u, v = new["u"], new["v"]
        found["mass"].append(u.sum())
        if step % 3 == 0:
            found["rough"].append(abs(laplacian(np.pad(u, 1, "wrap"))).max())
        if step % 2 == 0:
            found["rows"].append(v.sum(1))
        found["least"].append(min(u.min(), v.min()))
        found["cells"].append(u.size)
        found["number"].append(step - 1)
    return found, {"u": u, "v": v}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", mostly_slow(RANKS, [1, 4]))
@pytest.mark.parametrize("steps", [5, 140])  # less and more than a batch
def test_series(client, steps, ranks, overlap):
    u, v = abs(U) / 4, abs(V) / 4
    options = {"record": RECORD, "ranks": ranks, "overlap": overlap}
    made = iterate(react, {"u": array(u), "v": array(v)}, 1, steps, **options)
    assert [*made] == ["u", "v", *RECORD, "steps"]
    (found,) = dask.compute(made)
    series, fields = wanted_series(u, v, steps)
    assert found["steps"] == steps
    for name in ("u", "v"):
        assert np.array_equal(found[name], fields[name])
    for name, values in series.items():
        assert found[name].shape == np.shape(values)
        np.testing.assert_allclose(found[name], values, rtol=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
def test_until_reads_the_newest_records(client, ranks):
    seen = []

    def ends(last):
        seen.append(last)
        return last["mass"] < 100 and last.get("steps_done", 0) >= 8

    record = {
        "mass": lambda u: u.sum(),
        "steps_done": Record(lambda at: at.step + 1, every=4, op="max", dtype=int),
    }
    fields = {"u": array(np.ones((24, 20)))}
    options = {"record": record, "until": ends, "ranks": ranks}
    (found,) = dask.compute(iterate(lambda u: u * 0.7, fields, 0, 50, **options))
    assert found["steps"] == 8
    assert np.allclose(found["u"], 0.7**8)
    assert found["mass"].shape == (50,)
    np.testing.assert_allclose(found["mass"][:8], 480 * 0.7 ** np.arange(1, 9))
    assert np.isnan(found["mass"][8:]).all()
    assert found["steps_done"].tolist() == [4, 8] + [0] * 10


def test_a_killed_worker_leaves_no_gap(client, tmp_path):
    def step(u, at, folder):
        if at.step == 150 and at.rank == 1:
            die_once(folder / "killed")
        return u + 1

    record = {"mass": Record(lambda u: u.max(), op="max"), "late": Record(roughly, every=60)}
    options = {"record": record, "checkpoint_every": 40, "ranks": 2, "folder": tmp_path}
    made = iterate(step, {"u": array(np.zeros((24, 20)))}, 0, 200, **options)
    futures = client.compute([made["mass"], made["late"], made["steps"]])
    mass, late, steps = (result_of(client, future) for future in futures)
    assert np.array_equal(mass, np.arange(1.0, 201))
    assert np.array_equal(late, [60 * 480, 120 * 480, 180 * 480])
    assert steps == 200
    assert (tmp_path / "killed").exists()
    del futures
    nothing_is_left(client)


def roughly(u):
    return u.sum()


def test_series_grow():
    """They have no memory for steps that a run may never make."""
    ctx = Context(RankGrid.in_line(1))
    given = {"number": lambda t: t, "pairs": Record(lambda t: [t, -t], every=2, shape=(2,))}
    series = Series(checked_series(given, {"u"}, {"t"}, set()), 10**15, ctx)
    for step in range(1, 101):
        series.record(step, lambda _, step=step: {"t": step})
    series.combine()
    wanted = np.arange(1.0, 101)
    assert np.array_equal(series.values["number"], wanted)
    assert np.array_equal(series.values["pairs"], np.stack([wanted, -wanted], 1)[1::2])


def test_series_that_do_not_fit_into_memory_are_refused(client):
    """A large number of steps is a usual way to run until a condition holds."""
    record = {"mass": lambda u: u.sum()}
    options = {"record": record, "until": lambda last: True, "ranks": 2}
    made = iterate(lambda u: u, NAMED, 0, 10**13, **options)
    with pytest.raises(MemoryLimitError, match=r"series of records.*fewer steps, or Record\("):
        made["u"].compute()
    rarely = {"mass": Record(record["mass"], every=10**9)}
    options = {"record": rarely, "max_time": "0.1 s", "ranks": 2}
    (found,) = dask.compute(iterate(lambda u: u, NAMED, 0, 10**13, **options))
    assert found["mass"].shape == (10**4,)
    assert np.isnan(found["mass"]).all()


def test_estimates_have_the_series():
    record = {"rows": Record(row_sums, every=2, shape=(24,))}
    for every, copies in ((None, 0), ("30 s", 2 * GENERATIONS)):
        options = {"checkpoint_every": every, "ranks": 2}
        plain = estimate(iterate(react, {"u": array(U), "v": array(V)}, 1, 100, **options)["u"])
        found = estimate(
            iterate(react, {"u": array(U), "v": array(V)}, 1, 100, record=record, **options)["u"]
        )
        series_bytes = 50 * 24 * 8
        assert found.series_bytes == 3 * series_bytes
        assert found.state_bytes == plain.state_bytes + copies * series_bytes
        assert found.total_bytes == plain.total_bytes + (3 + copies) * series_bytes


def test_without_steps(client):
    options = {"record": {"mass": lambda u: u.sum()}, "ranks": 2}
    (found,) = dask.compute(iterate(lambda u: u, {"u": array(U)}, 0, 0, **options))
    assert found["mass"].shape == (0,)
    assert found["steps"] == 0


def test_wrong_values_are_named(client):
    for function, message in (
        (lambda u: u, r"a value of shape \(\)"),
        (lambda u: 1j, "becomes float64"),
        (lambda u: None, "object"),
    ):
        made = iterate(lambda u: u, {"u": array(U)}, 0, 2, record={"r": function}, ranks=2)
        with pytest.raises(BlockMismatchError, match=message):
            made["u"].compute()


def test_wrong_arguments_are_refused():
    def refused(message, record, fields=NAMED):
        with pytest.raises(InputError, match=message):
            iterate(lambda u: u, fields, 0, 2, record=record)

    refused("mapping of functions", [lambda u: 0])
    refused("names that no field has", {"u": lambda u: 0})
    refused("names that no field has", {"steps": lambda u: 0})
    refused("expected a function", {"r": 3})
    refused("got parameter 'w'", {"r": lambda w: 0})
    refused("without a parameter out", {"r": lambda out: 0})
    refused(
        "op of the record 'r': expected one of sum, prod, min, max, got 'mean'",
        {"r": Record(lambda u: 0, op="mean")},
    )
    refused("steps between records", {"r": Record(lambda u: 0, every=0)})
    refused("fields by name", {"r": lambda u: 0}, array(U))
    refused("name of a parameter for a record", {"a b": lambda u: 0})
