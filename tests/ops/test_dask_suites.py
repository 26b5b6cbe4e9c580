"""Dask's and NumPy's own tests, with this package's functions in their place.

What fails, and why, `dask_suites` says.
"""

from __future__ import annotations

import re

import pytest

from tests.suites import output_of_suite

pytestmark = pytest.mark.programs


@pytest.mark.parametrize(
    ("suite", "least", "refused"),
    [
        ("dask.array.tests.test_rechunk", 81, 1),
        ("dask.array.tests.test_overlap", 90, 7),
        ("dask.array.tests.test_fft", 243, 18),  # of which six are one test
        ("numpy.fft.tests.test_pocketfft", 101, 45),
    ],
)
def test_those_of_dask_and_numpy(tmp_path, suite, least, refused):
    # All lengths to 512, one by one, for 13 s: the quick tests have some of them.
    left_out = ["-k", "long or not test_identity"]
    output = output_of_suite("tests.ops.dask_suites", tmp_path, *left_out, "--pyargs", suite)
    assert int(re.search(r"(\d+) passed", output)[1]) >= least
    assert int(re.search(r"(\d+) xfailed", output)[1]) == refused
