"""Dask's and NumPy's own tests, with this package's functions in their place.

What fails, and why, `dask_suites` says.
"""

import re

import pytest

from tests.suites import output_of_suite

pytestmark = pytest.mark.programs(7)


@pytest.mark.parametrize(
    ("package", "suites", "least", "refused"),
    [
        ("dask.array", "test_rechunk test_overlap test_fft", 414, 26),
        ("numpy.fft", "test_pocketfft", 101, 45),
    ],
)
def test_those_of_dask_and_numpy(tmp_path, package, suites, least, refused):
    # All lengths to 512, one by one, for 13 s: the quick tests have some of them.
    left_out = ["-k", "long or not test_identity"]
    modules = [f"{package}.tests.{suite}" for suite in suites.split()]
    output = output_of_suite("tests.ops.dask_suites", tmp_path, *left_out, "--pyargs", *modules)
    assert int(re.search(r"(\d+) passed", output)[1]) >= least
    assert int(re.search(r"(\d+) xfailed", output)[1]) == refused
