from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import redistributions, report
from benchmarks.options import AnyClusterSpec
from benchmarks.transforms import transforms
from tests.benchmarks.support import results_of


@pytest.mark.parametrize("kind", ["numpy", "cupy"])
def test_cases_cut_the_whole_array(kind):
    cases = [*redistributions.scaled_cases(50, 4, kind), *redistributions.fixed_cases(4, kind)]
    assert len({case.name for case in cases}) == len(cases) == (13 if kind == "numpy" else 7)
    for case in cases:
        after = getattr(case, "after", case.chunks)
        for chunks, axes in ((case.chunks, sorted(case.axes)), (after, case.axes)):
            assert tuple(map(sum, chunks)) == tuple(case.shape[axis] for axis in axes)
            assert min(map(min, chunks)) > 0
        is_cut_anew = isinstance(case, redistributions.Redistribution) and case.axes != (1, 0)
        assert after != case.chunks or not is_cut_anew
    scaled = next(redistributions.scaled_cases(50, 4, kind))
    assert scaled.size_bytes == pytest.approx(50e6, rel=0.03)


@pytest.mark.parametrize(("shape", "depth"), [((9, 8), 1), ((6, 7, 8), 2)])
def test_a_star(shape, depth):
    x = np.random.default_rng(1).integers(0, 100, shape)
    whole = np.pad(x, depth, mode="wrap")
    expected = x + sum(
        np.roll(x, sign * step, axis)
        for axis in range(x.ndim)
        for step in range(1, depth + 1)
        for sign in (1, -1)
    )
    assert np.array_equal(redistributions.star(whole, depth), expected)


def test_rims_that_are_wrong_are_found(client):
    case = redistributions.Stencil((16, 16), ((8, 8), (8, 8)), (0, 1), np.dtype("f8"), depth=1)
    x = case.make()
    right = case.ways(False)["dask_p2p"].transpose(x, case.axes)
    assert case.wrong(right) == 0
    assert case.wrong(x) == 256
    assert case.wrong(right.map_blocks(np.add, 1)) == 256


def test_what_is_to_be_reached():
    case = next(redistributions.scaled_cases(50, 2, "cupy"))
    rows = [
        {"way": "dask_p2p", "median_s": 0.02, "moved_bytes": 620e6},
        {"way": "one no-op layer", "median_s": 0.01},
        {"way": "dask tasks", "median_s": 0.03},
        {"way": "dask p2p", "failed": "it always does"},
    ]
    redistributions.judged(rows, case, 2)
    assert rows[0]["budget_s"] == pytest.approx(0.01 + 0.001 + 0.002)
    assert (rows[0]["faster_by"], rows[0]["reach"]) == (pytest.approx(1.5), 1.4)
    redistributions.judged(rows[:2], case, 2)
    assert rows[0]["faster_by"] is None


@pytest.mark.slow
def test_what_the_program_writes(client, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "start", lambda _: nullcontext(client))
    monkeypatch.setattr(
        redistributions,
        "fixed_cases",
        lambda *_: [
            redistributions.Stencil(
                (16, 16), ((4,) * 4,) * 2, (0, 1), np.dtype("f8"), name="map_overlap"
            )
        ],
    )
    options = "--megabytes 1 --repeats 1 --case '16 row slabs' --case map_overlap"
    made, output = results_of(redistributions, tmp_path, options)
    assert (made["workers"], len(made["devices"])) == (4, 4)
    found = {(row["case"], row["way"]): row for row in made["rows"]}
    assert len(found) == 2 * 4 + 3
    assert not any("failed" in figures for figures in found.values())
    ours = {case: row for (case, way), row in found.items() if way == "dask_p2p"}
    assert all(row["wrong"] == 0 and row["faster_by"] > 0 for row in ours.values())
    assert all(len(row["cpu_s"]) == 1 and row["cpu_s"][0] > 0 for row in ours.values())
    columns = ours["16 row slabs to columns"]
    assert columns["least_anywhere_bytes"] == 3 / 4 * columns["matrix_bytes"]
    assert ours["4 x 4 to 16 row slabs"]["least_anywhere_bytes"] == 0
    halo = 2 * 16 * 8 * 4  # of each worker's row of blocks
    assert ours["map_overlap"]["least_anywhere_bytes"] == halo
    for figures in ours.values():
        assert figures["moved_bytes"] == figures["least_bytes"]
        assert figures["least_bytes"] >= figures["least_anywhere_bytes"]
    assert "16 row slabs to columns" in output


@pytest.mark.slow
def test_first_runs_have_clusters_of_their_own(client, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(report, "start", lambda _: started.append(None) or nullcontext(client))
    options = "--first --megabytes 1 --repeats 2 --case 'transpose of'"
    made, _ = results_of(redistributions, tmp_path, options)
    rows = made["rows"]
    assert (
        [len(row["times_s"]) for row in rows] == [len(row["second_s"]) for row in rows] == [2] * 4
    )
    assert len(started) == 2 * 4
    assert rows[0]["faster_by"] > 0


def test_what_is_measured_where_none_is_named():
    """Not what takes more than 60 % of the GPUs, at five times its size."""
    gib = 2**30
    large = list(transforms(2, "cupy"))[-1]
    assert large.size_bytes == 32 * gib

    def names(wanted, memory_bytes):
        spec = AnyClusterSpec(2, ("0", "1"), None, memory_bytes)
        cases = [*redistributions.scaled_cases(50, 2, "cupy"), *transforms(2, "cupy")]
        return [case.name for case in cases if redistributions.is_wanted(case, wanted, spec)]

    assert large.name in names((), 267 * gib)
    assert large.name not in names((), 266 * gib)
    assert len(names((), 266 * gib)) == len(names((), 267 * gib)) - 1
    assert names(("fftn, 2048",), 64 * gib) == [large.name]
    assert names(("rfftn",), 64 * gib) == ["rfftn, 1024 cubed"]


def test_names_that_are_none():
    result = CliRunner().invoke(redistributions.main, ["--case", "diagonal"])
    assert result.exit_code == 2
    assert "3-D pencils" in result.output
