from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

import dask_p2p
from benchmarks import fused_graphs, peaks
from tests.benchmarks.support import results_of


@pytest.mark.cluster
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


@pytest.mark.cluster
def test_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(peaks, "_RETAINED_S", 0.0)
    options = "--workers 2 --blocks 2 --kib 1 --repeats 1 --memory --program 'x + 1'"
    written, output = results_of(fused_graphs, tmp_path, options)
    assert "memory:" in output
    (row,) = written["rows"]
    assert [*row["peak_bytes"]] == list(fused_graphs.KINDS)
    assert {len(each) for each in row["peak_bytes"].values()} == {1}
    assert not written["residents"]


def filled(size_bytes):
    return len(bytearray(b"x" * size_bytes))


@pytest.mark.cluster
def test_the_peak_of_workers(client, monkeypatch):
    monkeypatch.setattr(peaks, "_RETAINED_S", 0.0)
    size_bytes, workers = 2**26, len(client.nthreads())
    found = peaks.peak_bytes(client, lambda: client.run(filled, size_bytes))
    assert found > workers * size_bytes, "memory that is free again counts"
    assert peaks.peak_bytes(client, lambda: None) < size_bytes


def test_other_values_are_an_error(monkeypatch, client):
    monkeypatch.setattr(dask_p2p, "fused", lambda y: y + 1)
    x = da.ones(8, chunks=2)
    with pytest.raises(RuntimeError, match="other values"):
        fused_graphs.measured(client, lambda x: x * 2, [x])


def test_slabs_have_about_the_size_that_is_asked_for(client):
    x = fused_graphs.slabs(client, 4, 8, 64, 0)
    assert x.shape == (512, 512)
    assert x.numblocks == (32, 1)
    assert np.prod(x.chunksize) * 8 == 2**16
