from __future__ import annotations

import numpy as np
import pytest

from benchmarks import sections
from benchmarks.rivals import mpi_stencil
from benchmarks.rivals.mpi_stencil import five_points
from tests.benchmarks.support import results_of


@pytest.mark.cluster
def test_what_is_compared_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "find_spec", lambda name: None)  # without mpi4py
    monkeypatch.setattr(sections, "counts", lambda side: (9, 2))
    made, _ = results_of(sections, tmp_path, "--side 32 --repeats 1")
    (row,) = made["rows"]
    assert row["side"] == 32
    assert row["step_s"].keys() == {
        sections.OURS,
        sections.OURS + sections.LEAST,
        sections.FIXED,
        sections.OUR_LAYER,
        sections.OUR_LAYERS,
        sections.DASK_LAYERS,
    }
    assert row["exchange_s"] == {}  # there is no kernel alone to compare with
    assert row["ratios"].keys() == {
        "dask_p2p.map_overlap / ours",
        "dask.array.map_overlap / ours",
        "one step / one layer",
    }


def test_the_two_forms_of_the_kernel_agree():
    u = np.random.default_rng(0).random((5, 6))
    out = np.empty((3, 4))
    five_points(u, out)
    assert np.array_equal(sections.with_halo(u)[1:-1, 1:-1], out)
    assert out[0, 0] == (u[0, 1] + u[2, 1] + u[1, 0] + u[1, 2]) / 4


def test_the_least_of_steps_in_a_row(monkeypatch):
    monkeypatch.setattr(mpi_stencil, "_began_s", [0.0, 9.0, 10.0, 11.0, 12.0, 13.0, 15.0, 40.0])
    assert mpi_stencil.least_noted() == (15.0 - 9.0) / 5
    assert mpi_stencil.least_noted() == np.inf


def test_an_exchange_is_what_steps_take_beside_the_kernel():
    each = {sections.OURS: [5.0, 4.0], sections.MPI: [3.5], sections.KERNEL: [3.0, 6.0]}
    times = {way + sections.LEAST: of for way, of in each.items()}
    assert sections.exchanges(times) == {sections.OURS: 1.0, sections.MPI: 0.5}


def test_ratios_are_of_medians():
    times = {
        sections.OURS: [1.0, 2.0, 9.0],
        sections.FIXED: [6.0],
        sections.OUR_LAYER: [3.0],
        sections.OUR_LAYERS: [4.0],
        sections.DASK_LAYERS: [8.0],
        sections.MPI: [1.0],
        sections.KERNEL: [0.5],
    }
    assert sections.ratios(times) == {
        "dask_p2p.map_overlap / ours": 2.0,
        "dask.array.map_overlap / ours": 4.0,
        "ours / mpi4py": 2.0,
        "ours / the kernel alone": 4.0,
        "one step / one layer": 2.0,
    }
