from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import fused_gpus


@pytest.mark.cluster
def test_what_is_compared_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_gpus, "_CALLS", 10)
    path = tmp_path / "result.json"
    sizes = ["--size", "16", "--cube", "16", "--side", "32", "--call", "16", "--runs", "1"]
    done = CliRunner().invoke(
        fused_gpus.main, ["--cpu", *sizes, "--json", str(path)], catch_exceptions=False
    )
    assert done.exit_code == 0
    written = json.loads(path.read_text())["results"]
    kinds = [fused_gpus.LAYERS, fused_gpus.FUSED, fused_gpus.COMPILED]
    assert [list(each) for each in written.values()] == [
        kinds,
        [*kinds, fused_gpus.HAND],
        *[["call_s"]] * 3,
    ]
    assert all(name in done.output for name in written)


def test_the_stencil_keeps_constants():
    block = np.full((12, 12, 12), 3.0)
    np.testing.assert_allclose(fused_gpus.star(block), block, rtol=1e-12)
