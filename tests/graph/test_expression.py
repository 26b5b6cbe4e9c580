from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.programs


def test_results_are_expressions_where_dask_plans_queries():
    """Dask decides when `dask.array` is imported; no option changes it later."""
    env = {**os.environ, "DASK_ARRAY__QUERY_PLANNING": "True"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.query_planning"],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
