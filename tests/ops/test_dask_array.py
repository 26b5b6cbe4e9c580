"""The tests of operations with `dask_array` in the place of `dask.array`."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import output_of

pytestmark = pytest.mark.programs(6)

ROOT = Path(__file__).parents[2]
TESTED = ("tests/ops", "tests/on_gpu", "tests/test_fft.py")
_GRAPH = "it looks into the graph, which dask_array optimises first"
_RUNS = "it looks for runs by the name of an array, and dask_array persists it under another"
_TRIM = "dask_array.map_overlap raises for these arguments, too: its chunks do not add up"
_LAZY = "dask_array passes lazy keywords as they are, so they are refused"
#: Tests that do not hold with `dask_array`, and the reasons.
DIFFERENT = {
    "on_gpu/test_block.py": "functions of the emulated GPU have no token, which dask_array needs",
    "on_gpu/test_map_on_gpu.py::test_runs_are_recorded": _RUNS,
    "ops/test_estimate.py::test_as_many_bytes_move_as_estimated": _RUNS,
    "ops/test_rechunk.py::test_the_methods_of_dask": "install does not change dask_array",
    "ops/test_overlap.py::test_arguments_that_dask_has_still_to_compute": _LAZY,
    "ops/test_overlap.py::test_depth_and_boundary_are_those_of_dask_by_default": _TRIM,
    "ops/test_overlap.py::test_functions_are_not_called_for_blocks_without_elements": _LAZY,
    "ops/test_overlap.py::test_functions_that_trim_are_called_for_all_blocks": _TRIM,
    "ops/test_overlap.py::test_names_and_numbers_of_axes": "names of dask_array have tokens",
    "ops/test_overlap.py::test_several_arrays_are_aligned_and_cut_as_dask_does": (
        "dask_array aligns blocks of several arrays in another way"
    ),
    "ops/test_overlap.py::test_without_trim_whatever_a_function_returns_is_taken": _TRIM,
    "ops/test_rechunk.py::test_a_large_graph_has_few_edges": _GRAPH,
    "ops/test_rechunk.py::test_blocks_of_groups_are_those_that_were_asked_for": _GRAPH,
    "ops/test_rechunk.py::test_one_layer_and_blocks_that_stay_are_handed_on": _GRAPH,
    "ops/test_rechunk.py::test_unknown_sizes_are_fine_along_axes_that_stay": _GRAPH,
    "ops/test_rechunk.py::test_a_slice_computes_only_the_blocks_it_needs": _GRAPH,
    "test_fft.py::test_on_workers": _RUNS,
    "test_fft.py::test_wrong_input_is_refused": "dask_array has no `ma`",
}


@pytest.mark.skipif(find_spec("dask_array") is None, reason="needs it: pip install dask-array")
def test_the_operations_of_arrays_of_dask_array():
    left_out = [option for name in DIFFERENT for option in ("--deselect", f"tests/{name}")]
    arguments = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    arguments += ["-p", "tests.xarray.dask_arrays", *left_out, *TESTED]
    assert int(re.search(r"(\d+) passed", output_of(*arguments, cwd=ROOT))[1]) >= 650
