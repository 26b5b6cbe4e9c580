from __future__ import annotations

import pytest

from benchmarks import sections
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs


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
