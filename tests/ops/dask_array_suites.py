"""Plugin for pytest: the tests of `dask_array` with this package in place of its functions.

`test_dask_suites` has pytest load it, in a process of its own. All rechunks without a method go by
this package. Tests that look at the expressions or tasks of Dask's own way are expected to fail.
"""

from __future__ import annotations

import dask_p2p
from tests.suites import expect_failures, module_of

FAN = "counts the blocks that one task reads, which takes regions here"
OWN = "looks for expressions or tasks of its own way"

#: Why tests fail, by module and name without parameters.
EXCEPTIONS = {
    "test_rechunk": {
        "test_rechunk_bounds_degree_transpose": FAN,
        "test_rechunk_bounds_fanin_pure_merge": FAN,
        "test_rechunk_bounds_fanout_pure_split": FAN,
        "test_rechunk_bounds_degree_scales_with_chunk_size": FAN,
        "test_rechunk_degree_limit_configurable": FAN,
        "test_rechunk_split_tasks_copy_small_selections": OWN,
        "test_rechunk_split_tasks_copy_small_selections_frisky": OWN,
    },
    "test_rechunk_pushdown": {
        "test_rechunk_composes_with_offgrid_slice": OWN,
        "test_rechunk_composes_no_cull_slice_blocked_above_elemwise": OWN,
        "test_rechunk_slice_composition_does_not_push_into_shared_leaf": OWN,
        "test_rechunk_slice_composition_does_not_push_into_shared_concatenate": OWN,
        "test_rechunk_slice_composition_keeps_outside_boundaries": OWN,
        "test_rechunk_slice_composition_declines_integers_and_steps": OWN,
        "test_rechunk_slice_composition_with_integer_axis_drop": OWN,
        "test_rechunk_slice_composition_multi_axis": OWN,
        "test_rechunk_pushes_through_expand_dims_and_composes_with_slice": OWN,
        "test_rechunk_slice_composition_declines_zero_target_chunks_and_heavy_trims": OWN,
    },
    "test_fft": {"test_cant_fft_chunked_axis": "expects an error where axes are cut"},
    "test_collection": {"test_blockwise": OWN},
}


def pytest_configure():
    """Install this package before the tests import the functions, for all rechunks."""
    import dask_array  # noqa: F401  # what is installed is put into it

    dask_p2p.install()
    from dask_p2p.tools import planned_late

    planned_late.choose_method = lambda *_, **__: "p2p"


def pytest_collection_modifyitems(items):
    for suite, reasons in EXCEPTIONS.items():
        if of_suite := [item for item in items if module_of(item) == suite]:
            expect_failures(of_suite, reasons)
