from __future__ import annotations

import dask

from dask_p2p.backends.host import cpu_name, link_gbs, versions


def test_versions():
    installed = versions()
    assert {"python", "dask", "distributed", "numpy", "cupy", "dask-cuda", "ucxx"} < set(installed)
    assert installed["dask-p2p"]
    assert installed["dask"] == dask.__version__


def test_cpu_name_says_something():
    assert cpu_name()


def test_links_of_a_gpu_that_is_not_there():
    assert link_gbs(bytes(16)) is None
