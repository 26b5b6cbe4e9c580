from __future__ import annotations

import pytest

from benchmarks import fused_gpus
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs


def test_what_is_compared_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_gpus, "_CALLS", 10)
    options = "--cpu --size 16 --cube 16 --side 32 --call 16 --runs 1"
    made, output = results_of(fused_gpus, tmp_path, options)
    written = made["results"]
    kinds = [fused_gpus.LAYERS, fused_gpus.FUSED, fused_gpus.COMPILED]
    assert [list(each) for each in written.values()] == [
        kinds,
        [*kinds, fused_gpus.HAND],
        *[["call_s"]] * 3,
    ]
    assert all(name in output for name in written)
