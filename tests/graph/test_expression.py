from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.programs


@pytest.mark.parametrize(
    ("library", "planning"),
    [("dask.array", "False"), ("dask.array", "True"), ("dask_array", "False")],
)
def test_results_are_arrays_of_the_library_of_their_inputs(library, planning):
    """Dask decides when `dask.array` is imported; no option changes it later."""
    if find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install dask-array")
    env = {
        **os.environ, "DASK_ARRAY__QUERY_PLANNING": planning, "ARRAY_LIBRARY": library
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.query_planning"],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
