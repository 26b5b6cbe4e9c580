from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support import output_of

pytestmark = pytest.mark.programs


@pytest.mark.parametrize(
    ("library", "planning"),
    [("dask.array", "False"), ("dask.array", "True"), ("dask_array", "False")],
)
def test_results_are_arrays_of_the_library_of_their_inputs(library, planning):
    """Dask decides when `dask.array` is imported; no option changes it later."""
    if find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install dask-array")
    variables = {"DASK_ARRAY__QUERY_PLANNING": planning, "ARRAY_LIBRARY": library}
    output_of("-W", "error", "-m", "tests.query_planning", **variables)
