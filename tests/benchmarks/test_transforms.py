from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import transforms
from benchmarks.transforms import Spectrum

pytestmark = pytest.mark.programs

CUBE = Spectrum((8,) * 3, ((2,) * 4, (8,), (8,)), (0, 1, 2), np.dtype("c16"))


def test_errors_that_are_printed(monkeypatch):
    monkeypatch.setattr(transforms, "_SHAPES", ((8, 8, 8), (101,)))
    made = CliRunner().invoke(transforms.main, ["--workers", "2"], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    figures = {
        shape.strip(): (float(single), float(double))
        for _, shape, single, double, _ in (
            line.split("│") for line in made.output.splitlines() if "e-" in line
        )
    }
    assert figures.keys() == {"8 x 8 x 8", "101"}
    for single, double in figures.values():
        assert 1e-9 < single < 1e-6
        assert double < 1e-15
