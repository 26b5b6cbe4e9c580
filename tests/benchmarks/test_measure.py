from __future__ import annotations

import numpy as np
import pytest

from benchmarks.measure import (
    Case,
    Way,
    compare,
    p2p_with,
)
from tests.support import given_up

pytestmark = pytest.mark.programs

CASE = Case((200, 120), ((50, 50, 50, 50), (120,)), (1, 0), np.dtype("f4"))
OURS = Way(p2p_with({}), required=True)


def one_by_one(mode="sync"):
    return Way(p2p_with({"p2p.mode": mode}), one_by_one=True, required=True)


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


def test_wrong_results_are_counted(client):
    (row,) = compare(client, {"wrong": Way(lambda x, axes: x.transpose(axes) + 1)}, CASE, 1)
    assert row["wrong"] == 200 * 120
