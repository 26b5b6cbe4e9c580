from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks
from benchmarks import chart

pytestmark = pytest.mark.programs

RESULTS = Path(benchmarks.__file__).parent / "results"
CHARTED = sorted(path for path in RESULTS.glob("*.json") if not path.stem.endswith("-engines"))


def test_results_that_are_there_as_one_chart(tmp_path):
    chart.main([*map(str, CHARTED), "-o", str(tmp_path / "chart.svg")])
    assert (tmp_path / "chart.svg").stat().st_size > 10_000
