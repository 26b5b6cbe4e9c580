from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from benchmarks import redistributions, report
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs


@pytest.mark.long
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
