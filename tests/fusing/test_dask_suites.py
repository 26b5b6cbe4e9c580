"""Dask's own tests of arrays, each graph run by one gang. `dask_suites` names those that fail."""

import re

import pytest

from tests.suites import output_of_suite

pytestmark = pytest.mark.programs(25)


#: Suites that one process runs, and the least numbers of tests that pass and of gangs.
QUICK = ("test_overlap test_rechunk test_atop test_reshape test_shuffle", 301, 490)
LONG = [
    ("test_array_function", 69, 200),
    ("test_creation", 1208, 2500),
    ("test_fft", 264, 1000),
    ("test_gufunc", 51, 80),
    ("test_linalg", 398, 2000),
    ("test_masked", 139, 900),
    ("test_random", 60, 600),
    ("test_routines", 726, 2000),
    ("test_slicing", 124, 6000),
]


@pytest.mark.parametrize(
    ("suites", "passed", "gangs"),
    [QUICK, *(pytest.param(*suite, marks=pytest.mark.long) for suite in LONG)],
)
def test_suites_of_dask(tmp_path, suites, passed, gangs):
    modules = [f"dask.array.tests.{suite}" for suite in suites.split()]
    output = output_of_suite("tests.fusing.dask_suites", tmp_path, "--pyargs", *modules)
    assert int(re.search(r"(\d+) passed", output)[1]) >= passed
    assert int(re.search(r"(\d+) gangs", output)[1]) >= gangs
