"""Dask's own tests of arrays, each graph run by one gang. `dask_suites` names those that fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support import import_path

pytestmark = pytest.mark.programs


QUICK = [
    ("test_overlap", 98, 250),
    ("test_rechunk", 81, 40),
    ("test_masked", 139, 900),
    ("test_atop", 60, 50),
    ("test_reshape", 50, 30),
    ("test_shuffle", 12, 30),
]
LONG = [
    ("test_array_function", 69, 200),
    ("test_creation", 1208, 2500),
    ("test_fft", 264, 1000),
    ("test_gufunc", 51, 80),
    ("test_linalg", 398, 2000),
    ("test_random", 60, 600),
    ("test_routines", 726, 2000),
    ("test_slicing", 124, 6000),
]


@pytest.mark.parametrize(
    ("suite", "passed", "gangs"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG)],
)
def test_suites_of_dask(tmp_path, suite, passed, gangs):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.fusing.dask_suites"]
    # Without the options of this project, and of the checkout.
    command += ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "--pyargs", f"dask.array.tests.{suite}"]
    env = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= passed
    assert int(re.search(r"(\d+) gangs", done.stdout)[1]) >= gangs
