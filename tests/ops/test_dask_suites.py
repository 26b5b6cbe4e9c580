"""Dask's and NumPy's own tests, with this package's functions in their place.

What fails, and why, `dask_suites` says. Those of distributed are in neither its wheel nor its
source distribution; with a checkout of the release that is installed::

    git clone --branch 2026.7.1 https://github.com/dask/distributed /tmp/distributed
    DISTRIBUTED_SOURCE=/tmp/distributed pytest tests/ops/test_dask_suites.py
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec

import pytest

from tests.ops.dask_suites import DISTRIBUTED, DISTRIBUTED_SOURCE
from tests.suites import output_of_suite

pytestmark = pytest.mark.programs

#: Suites of `dask_array`, the least number of tests that pass, and the number that fail.
OF_DASK_ARRAY = {
    "rechunks, overlaps and transforms": (
        *("test_rechunk", "test_rechunk_pushdown", "test_fft", "test_collection"),
        *("test_fuzz_optimize", "test_overlap_optimizer", "test_slice_through_overlap"),
        *("test_slice_pushdown", "test_transpose_slice_pushdown"),
        *(559, 24),  # six failures are one test
    ),
    "transposes, windows and aligned chunks": (
        *("test_routines", "test_sliding_window_reductions", "test_binary_op_chunks"),
        *("test_coarse_slice_through_blockwise", "test_transfer"),
        *(800, 1),  # which the package expects to fail
    ),
}


def passed_and_failed(folder, *arguments, source=None, plugin="dask_suites"):
    """Numbers of tests that passed, and that failed as they were expected to."""
    given = f"tests.ops.{plugin}", folder, *arguments
    output = output_of_suite(*given, DISTRIBUTED_SOURCE=source or "")
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


@pytest.mark.skipif(find_spec("dask_array") is None, reason="needs it: pip install dask-array")
@pytest.mark.parametrize("group", OF_DASK_ARRAY)
def test_those_of_dask_array(group, tmp_path):
    *suites, least, refused = OF_DASK_ARRAY[group]
    modules = [f"dask_array.tests.{name}" for name in suites]
    passed, failed = passed_and_failed(
        str(tmp_path), "--pyargs", *modules, plugin="dask_array_suites"
    )
    assert passed >= least
    assert failed == refused


@pytest.mark.parametrize("group", OF_DASK_ARRAY)
def test_few_of_them_fail(group):
    *_, passed, failed = OF_DASK_ARRAY[group]
    assert failed <= 0.05 * (passed + failed)


@pytest.mark.skipif(DISTRIBUTED_SOURCE is None, reason="needs DISTRIBUTED_SOURCE, a checkout")
def test_those_of_distributed(tmp_path):
    source = os.path.abspath(DISTRIBUTED_SOURCE)
    tests = os.path.join(source, "distributed", "shuffle", "tests", "test_rechunk.py")
    passed, failed = passed_and_failed(
        str(tmp_path), "--import-mode=importlib", tests, source=source
    )
    assert passed >= 93
    assert failed == len(DISTRIBUTED)
