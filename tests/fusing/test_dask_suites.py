"""Dask's own tests of arrays, each graph run by one gang. `dask_suites` names those that fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support import import_path

pytestmark = pytest.mark.programs


@pytest.mark.parametrize(
    ("suite", "passed", "gangs"),
    [("test_overlap", 98, 250), ("test_rechunk", 81, 40), ("test_masked", 139, 900)],
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
