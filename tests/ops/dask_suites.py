"""Plugin for pytest: Dask's own tests of `rechunk` with this package's function in its place.

`test_dask_suites` has pytest load it, in a process of its own. Tests of what only Dask's own way
has are expected to fail. One that passes is an error: it would show that nothing was replaced.
"""

from __future__ import annotations

import os
import sys

import dask
import pytest

import dask_p2p

#: A checkout of dask/distributed: neither its wheel nor its source distribution has the tests.
DISTRIBUTED_SOURCE = os.environ.get("DISTRIBUTED_SOURCE")

OWN_NAMES = "looks for tasks of the name that Dask's own way gives them"

#: Why tests of Dask fail, by name.
DASK = {"test_rechunk_intermediates": "counts the tasks that split and merge blocks"}
#: Why tests of distributed fail, by name.
DISTRIBUTED = {
    "test_rechunk_configuration[p2p-tasks]": OWN_NAMES,
    "test_rechunk_configuration[p2p-p2p]": OWN_NAMES,
    "test_rechunk_configuration[p2p-None]": OWN_NAMES,
    "test_rechunk_configuration[None-p2p]": OWN_NAMES,
    "test_rechunk_configuration[None-None]": OWN_NAMES,
    "test_rechunk_heuristic[new0-p2p]": OWN_NAMES,
    "test_rechunk_heuristic[new3-p2p]": OWN_NAMES,
    "test_cull_p2p_rechunk_overlapping_partitions": "counts more tasks than there are here",
    "test_rechunk_in_memory_shards_dont_share_buffer": "looks into the shuffle's buffers",
    "test_partial_rechunk_taskgroups": "waits for the shuffle's barrier",
    "test_homogeneously_schedule_unpack": OWN_NAMES,
}
#: These wait in vain, and so are not run.
WAITING = {"test_partial_rechunk_taskgroups"}


def pytest_configure(config):
    """Replace the functions before the tests import them."""
    if DISTRIBUTED_SOURCE is None:
        replace_function()
    else:
        prepare_distributed()
        dask_p2p.install()


def replace_function():
    """Put `dask_p2p.rechunk` in the place of `dask.array.rechunk`, whatever method is chosen."""
    import dask.array as da

    module = sys.modules["dask.array.rechunk"]  # `da.rechunk` is the function
    by_tasks = module.rechunk

    def rechunk(
        x, chunks="auto", threshold=None, block_size_limit=None, balance=False, method=None
    ):
        if method == "tasks":  # `dask_p2p.rechunk` itself, for unknown sizes of chunks
            return by_tasks(x, chunks, threshold, block_size_limit, balance, method)
        return dask_p2p.rechunk(x, chunks, balance=balance, block_size_limit=block_size_limit)

    module.rechunk = da.rechunk = rechunk


def prepare_distributed():
    """Make the tests' own modules known, and the plugins on all of their clusters."""
    # The tests reset the configuration to what it is now, when this is first imported.
    dask.config.set({"distributed.scheduler.preload": ["dask_p2p.preload"]})
    import distributed.utils_test

    package = sys.modules["distributed.shuffle"]
    package.__path__.append(os.path.join(DISTRIBUTED_SOURCE, "distributed", "shuffle"))
    globals()["loop"] = distributed.utils_test.loop


def pytest_collection_modifyitems(items):
    exceptions = DASK if DISTRIBUTED_SOURCE is None else DISTRIBUTED
    missing = exceptions.keys() - {item.name for item in items}
    if missing:
        raise pytest.UsageError(f"there are no tests {missing} any more")
    for item in items:
        if item.name in exceptions:
            reason, is_run = exceptions[item.name], item.name not in WAITING
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True, run=is_run))
