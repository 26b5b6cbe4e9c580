from __future__ import annotations

import pytest

from benchmarks import fused_graphs
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs


def test_what_is_compared_and_written(tmp_path):
    options = "--workers 2 --blocks 2 --kib 1 --repeats 2"
    written, _ = results_of(fused_graphs, tmp_path, options)
    rows = written["rows"]
    assert [row["program"] for row in rows] == list(fused_graphs.PROGRAMS)
    for row in rows:
        assert row["cpu_s layers / fused"] > 0
        assert row["wall_s layers / auto"] > 0
        is_by_hand = fused_graphs.PROGRAMS[row["program"]] in fused_graphs.BY_HAND
        kinds = [*fused_graphs.KINDS, *[fused_graphs.HAND] * is_by_hand]
        assert [*row["seconds"]] == kinds
        for kind in kinds:
            assert {name: len(of) for name, of in row["seconds"][kind].items()} == {
                "cpu_s": 2,
                "wall_s": 2,
            }
    assert [row["program"] for row in written["residents"]] == list(fused_graphs.RESIDENT)
    for row in written["residents"]:
        assert row["layers / call"] > 0
        assert {len(of) for of in row["seconds"].values()} == {2}
