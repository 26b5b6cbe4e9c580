"""Plugin for pytest: Dask's own tests of arrays, with a client and the option `p2p.fuse: on`.

`test_dask_suites` runs them in a process of its own. Without the plugin these tests compute in the
main thread, where the option has no effect.
"""

import dask
import pytest
from dask.array.utils import assert_eq

from tests.suites import expect_failures
from tests.support import noted

COUNTS = "counts tasks of another method, since rechunks depend on the client"
#: Some runs fail: the cluster may still have the keys of the first array.
COLLIDES = "makes arrays of the same name and other chunks"
#: Causes of failures of Dask's tests, by module and name.
EXPECTED = {
    "test_rechunk": {"test_rechunk_intermediates": COUNTS},
    "test_shuffle": {"test_shuffle_config_tolerance": COLLIDES},
}
GANGS = pytest.StashKey[list[int]]()


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    """Start a cluster, and set the option."""
    from distributed import Client, LocalCluster

    from dask_p2p.fusing import suitability

    # Tests compute with scheduler="sync" by default.
    assert_eq.__defaults__ = tuple(
        None if value == "sync" else value for value in assert_eq.__defaults__
    )
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
    )
    session.config.add_cleanup(cluster.close)
    session.config.add_cleanup(Client(cluster).close)
    dask.config.set({"p2p.fuse": "on"})
    patch = pytest.MonkeyPatch()
    session.config.stash[GANGS] = noted(patch, suitability, "fused_gang", lambda *_, **options: 1)


def pytest_collection_modifyitems(items):
    expect_failures(items, EXPECTED, optional={COLLIDES})


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(f"{len(config.stash[GANGS])} gangs")
