from __future__ import annotations

import sys

import pytest
from hypothesis import settings

# Machines that are busy with clusters would fail examples by their time alone.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


def gpu_count() -> int:
    """Usable GPUs; 0 without CuPy."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:
        return 0


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    """Skip what is slow unless it is asked for, and what needs more GPUs than there are."""
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: give --slow to run it"))
    skip_without_gpus(items)


def skip_without_gpus(items):
    """Skip tests marked `gpu`, or `gpu(n)`, where there are fewer GPUs than they need."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    there = gpu_count()
    for item in marked:
        args = item.get_closest_marker("gpu").args
        needed = args[0] if args else 1
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), there are {there}"))


@pytest.fixture(scope="session")
def cluster():
    """Four single-thread worker processes over TCP, shared by all tests that do no harm."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=4,
        threads_per_worker=1,
        protocol="tcp://",
        dashboard_address=":0",
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    from distributed import Client

    with Client(cluster) as client:
        yield client
