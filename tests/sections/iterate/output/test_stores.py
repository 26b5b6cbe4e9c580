"""Frames and checkpoints that `iterate` writes to files while it runs."""

import warnings

import dask
import dask.array as da
import numpy as np
import pytest
import zarr

from dask_p2p import Checkpoint, Record, Save, Whole, iterate
from dask_p2p.errors import BlockMismatchError, FileError, InputError, MemoryLimitError, P2PWarning
from tests.sections.iterate.test_coupled import U, V, array, both, inner, laplacian, react
from tests.sections.support import nothing_is_left
from tests.support import die_once, mostly_slow, result_of

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
A, B = abs(U) / 4, abs(V) / 4
MASS = {"mass": lambda u: inner(u).sum(), "top": Record(lambda v: v.max(), every=3, op="max")}


def fields(chunks=((8, 8, 8), (10, 10))):
    return {"u": array(A, chunks), "v": array(B, chunks)}


def states(steps):
    """Return the fields after each step."""
    states_by_step = [{"u": A, "v": B}]
    for _ in range(steps):
        states_by_step.append(both(states_by_step[-1], 1, 1, [(react, "uv")]))
    return states_by_step


def run_here(*arguments, **options):
    """Run `iterate` with one rank in this process; return its results."""
    return dask.compute(iterate(*arguments, ranks=1, **options), scheduler="sync")[0]


@pytest.mark.parametrize(
    ("chunks", "stored"),
    [
        (((8, 8, 8), (10, 10)), (8, 10)),
        (((10, 14), (5, 5, 10)), (10, 5)),
        (((8, 12, 4), 20), (4, 20)),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_frames(client, tmp_path, ranks, chunks, stored):
    save = [Save(tmp_path / "all", 3), Save(tmp_path / "v", 5, ["v"])]
    (result,) = dask.compute(iterate(react, fields(chunks), 1, 11, save=save, ranks=ranks))
    expected = states(11)
    assert np.array_equal(result["u"], expected[11]["u"])
    group = zarr.open(tmp_path / "all", mode="r")
    shapes = {name: array.shape for name, array in group.arrays() if array.ndim > 1}
    assert shapes == dict.fromkeys("uv", (3, 24, 20))
    assert group["u"].chunks == (1, *stored)
    assert (group.attrs["frames"], group.attrs["steps"]) == (3, 9)
    for name in "uv":
        for frame, step in enumerate((3, 6, 9)):
            assert np.array_equal(group[name][frame], expected[step][name])
    only = zarr.open(tmp_path / "v", mode="r")
    assert {name for name, _ in only.arrays()} == {"v", "frame", "step"}
    assert np.array_equal(only["v"][1], expected[10]["v"])


def test_ranks_that_share_chunks_of_a_store_write_in_turn(client, tmp_path):
    """An earlier run with one rank has made chunks that are wider than a local block."""
    stores = {"save": Save(tmp_path / "frames", 1), "checkpoint": Checkpoint(tmp_path / "at", 1)}
    dask.compute(iterate(react, fields((24, 20)), 1, 2, ranks=1, **stores))
    dask.compute(iterate(react, fields((6, 10)), 1, 15, ranks=4, **stores))
    group, expected = zarr.open(tmp_path / "frames", mode="r"), states(15)
    assert group["u"].chunks == (1, 24, 20)
    for name in "uv":
        for frame in range(15):
            assert np.array_equal(group[name][frame], expected[frame + 1][name]), (name, frame)


@pytest.mark.parametrize("has_files", [True, False])
def test_a_killed_worker_in_the_middle_of_a_run(client, tmp_path, has_files):
    """It resumes from a checkpoint in files, or in memory, with all frames, records and numbers.

    Neither a field that never changes nor time levels send ranks to the start.
    """

    def kills(u, v, w, still, t, at, folder):
        if (folder / "killed").exists():
            (folder / f"resumed-{at.step}").touch()
        elif at.step == 10 and at.rank == 1:
            die_once(folder / "killed")
        now, before = map(inner, w)
        return {**react(u, v), "w": 2 * now - before + inner(still), "t": t + 0.5}

    every = {"checkpoint": Checkpoint(tmp_path / "states", 4)} if has_files else {}
    options = {"save": Save(tmp_path / "frames", 2), "record": MASS, "checkpoint_every": 2, **every}
    u, v = fields().values()
    fields_of_run = {"u": u, "v": v, "w": [u, v], "still": u * 0, "t": 0.0}
    lazy_result = iterate(kills, fields_of_run, 1, 15, ranks=2, folder=tmp_path, **options)
    newest, _ = lazy_result["w"]
    futures = client.compute([*(lazy_result[name] for name in ("u", "t", "mass", "top")), newest])
    u, t, mass, top, w = (result_of(client, future) for future in futures)
    expected = states(15)
    assert (tmp_path / "killed").exists()
    resumed_at = [int(path.name.partition("-")[2]) for path in tmp_path.glob("resumed-*")]
    assert min(resumed_at) >= 8
    now, before = A, B
    for _ in range(15):
        now, before = 2 * now - before, now
    assert np.array_equal(w, now)
    assert np.array_equal(u, expected[15]["u"])
    assert t == 15 * 0.5
    np.testing.assert_allclose(mass, [state["u"].sum() for state in expected[1:]], rtol=1e-13)
    assert top.tolist() == [state["v"].max() for state in expected[3::3]]
    group = zarr.open(tmp_path / "frames", mode="r")
    assert group.attrs["frames"] == 7
    for frame in range(7):
        assert np.array_equal(group["v"][frame], expected[2 * frame + 2]["v"])
    del futures
    nothing_is_left(client)


def test_a_run_with_other_records_names_those_without_values(tmp_path):
    def run(steps, **records):
        record = {"mass": lambda u: inner(u).sum(), **records}
        options = {"record": record, "checkpoint": Checkpoint(tmp_path, every=3)}
        return run_here(reads_top, fields(), 1, steps, **options)

    def reads_top(u, v, at):
        assert "top" not in at.last or at.step > 3
        return react(u, v)

    counted = Record(lambda v: (v > 0).sum(), dtype=int)
    top = Record(lambda v: v.max(), op="max")
    with warnings.catch_warnings(action="error"):
        run(3)
    text = r"resumes at step 3 of .*, which has no values of count, top\. Their series have"
    with pytest.warns(P2PWarning, match=text):
        result = run(6, top=top, count=counted)
    assert np.isnan(result["top"][:3]).all()
    assert result["count"][:3].tolist() == [0, 0, 0]
    expected = states(9)
    assert result["top"][3:].tolist() == [state["v"].max() for state in expected[4:7]]
    with warnings.catch_warnings(action="error"):
        assert run(9, top=top)["top"][6:].tolist() == [state["v"].max() for state in expected[7:]]
    for other in ({"every": 3}, {"shape": (1,)}, {"dtype": "f4"}):
        with pytest.raises(InputError, match="Give top another name, or the checkpoint"):
            run(12, top=Record(lambda v: v.max(), **{"op": "max", **other}))


def test_of_two_runs_that_write_the_same_frames_the_first_ends(tmp_path):
    def stops(u, v, at):
        if at.step == 2:
            run_here(react, fields(), 1, 4, save=save)
        return react(u, v)

    save = Save(tmp_path, 1)
    with pytest.raises(FileError, match=r"one run at a time that writes frames .* got another one"):
        run_here(stops, fields(), 1, 4, save=save)
    assert zarr.open(tmp_path, mode="r").attrs["frames"] == 4


# --- refused


def test_stores_of_other_programs_are_refused(tmp_path):
    def run(steps=4, run_fields=None, **options):
        return run_here(react, run_fields or fields(), 1, steps, **options)

    frames, checkpoint = Save(tmp_path / "frames", 2), Checkpoint(tmp_path / "states", every=2)
    run(save=frames, checkpoint=checkpoint)
    run(save=frames)  # the same program writes the same frames
    with pytest.raises(InputError, match=r"frames of the same fields and steps.*every 2 in place"):
        run(save=Save(tmp_path / "frames", 1))
    with pytest.raises(InputError, match=r"expected 2 frames .* resumes at step 4, got 0"):
        run(steps=6, save=Save(tmp_path / "new", 2), checkpoint=checkpoint)
    with pytest.raises(InputError, match="because of resume=False"):
        run(checkpoint=Checkpoint(tmp_path / "states", every=2, resume=False))
    with pytest.raises(InputError, match="at least 4 steps"):
        run(steps=3, checkpoint=checkpoint)
    other_fields = {"u": array(A[:12], 12), "v": array(B[:12], 12)}
    with pytest.raises(InputError, match="a checkpoint of the same fields"):
        run(steps=6, run_fields=other_fields, checkpoint=checkpoint)
    longs = {name: a.astype(np.longdouble) for name, a in other_fields.items()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(InputError, match=r"expected a new folder.* got a folder with notes\.txt"):
        run(save=Save(tmp_path / "other", 2))
    with pytest.raises(InputError, match=r"dtypes that Zarr has, got \w+ of u\. Give"):
        run(run_fields=longs, save=Save(tmp_path / "longs", 2))
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"Make room, or give another path"):
        run(save=Save(tmp_path / "file", 2))


def test_wrong_arguments_are_refused():
    def refused(message, fields=None, **options):
        fields = {"u": array(A, 8)} if fields is None else fields
        with pytest.raises(InputError, match=message):
            iterate(lambda u: u, fields, 0, 2, **options)

    refused("expected names of fields", save=Save("frames", 2, ["w"]))
    refused("steps between frames", save=Save("frames", 0))
    refused("expected a Checkpoint object", checkpoint="states")
    refused("another path for each store", save=[Save("a", 1)], checkpoint=Checkpoint("a"))
    refused("the path or URL of a folder", save=Save(b"frames", 2))
    refused("fields by name", array(A, 8), save=Save("frames", 2))
    refused("which Zarr needs", {"u": array(A, ((7, 5, 12), (3, 8, 9)))}, save=Save("frames", 2))


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


def test_the_end_that_one_rank_finds_ends_all(client, tmp_path):
    """Such as by its clock."""

    def until(last):
        try:
            (tmp_path / "ends").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    options = {"record": {"mass": lambda u: u.sum()}, "until": until, "ranks": 2}
    result = iterate(lambda u: {"u": u + 1}, {"u": array(U * 0)}, 0, 9, **options)
    u, steps = dask.compute(result["u"], result["steps"])
    assert steps == 1
    assert (u == 1).all()


def test_wrong_values_are_named(client):
    for function, message in (
        (lambda u: u, r"a value of shape \(\)"),
        (lambda u: 1j, "becomes float64"),
        (lambda u: None, "object"),
    ):
        lazy_result = iterate(lambda u: u, {"u": array(U)}, 0, 2, record={"r": function}, ranks=2)
        with pytest.raises(BlockMismatchError, match=message):
            lazy_result["u"].compute()


def test_wrong_records_are_refused():
    def refused(message, record, fields=NAMED):
        with pytest.raises(InputError, match=message):
            iterate(lambda u: u, fields, 0, 2, record=record)

    refused("names that no field has", {"u": lambda u: 0})
    refused("names that no field has", {"steps": lambda u: 0})
    refused("names of fields than 'steps'", {"r": lambda u: 0}, {"u": array(U), "steps": 0.0})
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
    options = {"ranks": 3, "constants": constants, "record": record}
    fields = {**NAMED, "t": 0.0}
    (result,) = dask.compute(iterate(lambda u, t: {"t": t + 1}, fields, 0, 2, **options))
    assert (result["product"].tolist(), result["times"].tolist()) == ([18, 18], [1, 2])
