"""Dask's and NumPy's own tests, with this package's functions in their place.

What fails, and why, `dask_suites` says. Those of distributed are in neither its wheel nor its
source distribution; with a checkout of the release that is installed::

    git clone --branch 2026.7.1 https://github.com/dask/distributed /tmp/distributed
    DISTRIBUTED_SOURCE=/tmp/distributed pytest tests/ops/test_dask_suites.py
"""

from __future__ import annotations

import os
import re

import pytest

from tests.ops.dask_suites import DISTRIBUTED, DISTRIBUTED_SOURCE
from tests.suites import output_of_suite

pytestmark = pytest.mark.programs


def passed_and_failed(folder, *arguments, source=None):
    """Numbers of tests that passed, and that failed as they were expected to."""
    command = "tests.ops.dask_suites", folder, *arguments
    output = output_of_suite(*command, DISTRIBUTED_SOURCE=source or "")
    passed, failed = (re.search(rf"(\d+) {word}", output) for word in ("passed", "xfailed"))
    return int(passed[1]), int(failed[1]) if failed else 0


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
    passed, failed = passed_and_failed(str(tmp_path), *left_out, "--pyargs", suite)
    assert passed >= least
    assert failed == refused


@pytest.mark.skipif(DISTRIBUTED_SOURCE is None, reason="needs DISTRIBUTED_SOURCE, a checkout")
def test_those_of_distributed(tmp_path):
    source = os.path.abspath(DISTRIBUTED_SOURCE)
    tests = os.path.join(source, "distributed", "shuffle", "tests", "test_rechunk.py")
    passed, failed = passed_and_failed(
        str(tmp_path), "--import-mode=importlib", tests, source=source
    )
    assert passed >= 93
    assert failed == len(DISTRIBUTED)
