import asyncio
import gc
import inspect
import os
import re
import subprocess
from collections import Counter
from functools import cache
from types import CodeType

import dask.array
import pytest
from hypothesis import settings

# Machines that are busy with clusters would fail examples by their time alone.
settings.register_profile("default", deadline=None, max_examples=25)
settings.register_profile("long", deadline=None, max_examples=300)
settings.load_profile("default")

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and commands would fold what they print

SHARING = 2  # workers on one GPU, by `--share-gpu`
MOST_PROCESSES = 8  # each may have a cluster of its own
WITH_CLUSTERS = "not programs", "slow or programs"
OF_FEW_FILES = "programs", "slow or programs"  # selections whose files name one of these marks
SKIPPED = "slow", "long"  # marks of tests that an option of the same name runs


def gpu_count() -> int:
    """Usable GPUs; 0 without CuPy."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:
        return 0


def pytest_addoption(parser):
    for mark in SKIPPED:
        parser.addoption(f"--{mark}", action="store_true", help=f"also run the tests marked {mark}")
    parser.addoption("--kills", type=int, default=6, help="kills of whole jobs, by default 6")
    parser.addoption("--share-gpu", action="store_true", help="run tests of two GPUs on one")


def pytest_configure(config):
    """Look at more examples where time does not matter."""
    if config.getoption("--long"):
        settings.load_profile("long")


def pytest_xdist_auto_num_workers(config):
    """Run all tests in parallel, but one by one those that are named, and those on GPUs.

    Tests with clusters wait a good deal, and stand beside others that compute: then there are two
    processes for each core. The others alone, and programs alone, wait less.
    """
    if config.args_source is config.ArgsSource.ARGS or gpu_count():
        return 0
    for_two_cores = 4 if config.option.markexpr in WITH_CLUSTERS else 3
    return min(for_two_cores * (os.cpu_count() or 1) // 2 or 1, MOST_PROCESSES)


def pytest_ignore_collect(collection_path, config):
    """Import no other file where tests of few files are asked for: all take half a minute."""
    if collection_path.suffix == ".py" and config.option.markexpr in OF_FEW_FILES:
        return None if names_mark(collection_path) else True
    return None


@cache
def names_mark(path):
    return re.search(r"mark\.(slow|programs)|mostly_slow", path.read_text("utf-8"))


def pytest_collection_modifyitems(config, items):
    """Mark tests that start clusters or programs; sort files; skip tests that cannot run here."""
    for item in items:
        if starts_cluster(item) or item.get_closest_marker("programs"):
            item.add_marker("cluster")
        if item.get_closest_marker("programs") or item.get_closest_marker("slow"):
            assert names_mark(item.path), f"{item.path} would be left out"
    order = file_order(items)
    items.sort(key=lambda item: order[item.path])
    for mark in SKIPPED:
        if not config.getoption(f"--{mark}"):
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=f"{mark}: give --{mark} to run it"))
    skip_without_gpus(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage meanwhile: there is hardly any, and it would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def file_order(items):
    """Return the position of each file, from 0 to 1: files that wait run with files that compute.

    Of files with clusters, and of the others, those that take long go first: no process is left
    alone with one at the end. A test with a cluster takes about as long as ten others, and one of
    `programs(n)` as long as n with a cluster.
    """
    with_clusters, without = Counter(), Counter()
    for item in items:
        if item.get_closest_marker("cluster"):
            programs = item.get_closest_marker("programs")
            with_clusters[item.path] += 10 * (programs.args[0] if programs and programs.args else 1)
        else:
            without[item.path] += 1
    for path in with_clusters:
        with_clusters[path] += without.pop(path, 0)
    order = {}
    for weights in (with_clusters, without):
        before = 0
        for path, weight in weights.most_common():
            order[path] = before / weights.total()
            before += weight
    return order


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run tests that are coroutines, each on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


last_path = None


def pytest_runtest_setup(item):
    """Permit clusters only in marked tests, so that the quick tests stay quick."""
    global last_path, may_start_clusters
    if item.path != last_path:
        # Tests that collect garbage would look through all that earlier files left, each time.
        gc.collect()
        gc.freeze()
        last_path = item.path
    may_start_clusters = item.get_closest_marker("cluster") or item.get_closest_marker("gpu")


STARTERS = {"LocalCluster", "local_cluster"}
may_start_clusters = False


def starts_cluster(item):
    """Return whether a test, one of its fixtures, or a helper of theirs names a cluster class."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # with those that they override
    functions = [fixture.func for of_name in fixtures for fixture in of_name]
    return any(map(names_starter, [item.function, *functions]))


@cache  # cases of one test have it in common, and fixtures
def names_starter(function):
    """Search the names in a function of the tests, in the functions that it names, and so on."""
    pending, visited = [function], set()
    while pending:
        function = inspect.unwrap(pending.pop())
        if not inspect.isfunction(function) or function in visited:
            continue
        visited.add(function)
        if function.__module__.startswith(("tests", "conftest")):
            names = names_in(function.__code__)
            if names & STARTERS:
                return True
            pending += map(function.__globals__.get, names)
    return False


@cache
def names_in(code):
    """Return the names that a function and its inner functions use."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def skip_without_gpus(items):
    """Skip tests marked `gpu`, or `gpu(n)`, where there are fewer GPUs than they need."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    gpus = gpu_count()
    for item in marked:
        is_shared = gpus and item.config.getoption("--share-gpu") and "tests/gpu" in item.nodeid
        args = item.get_closest_marker("gpu").args
        required = args[0] if args else 1
        if gpus < required and not (is_shared and required == SHARING):
            item.add_marker(pytest.mark.skip(reason=f"needs {required} GPU(s), there are {gpus}"))


@pytest.fixture(scope="session", autouse=True)
def _light_clusters():
    """Make clusters that a test starts in this process start and idle in little time.

    Programs that tests run, and workers on GPUs, have the settings of users.
    """
    if gpu_count():
        yield
        return
    import dask
    from distributed import Nanny, SpecCluster

    from tests.support import FORKED, PATIENT, UNWATCHED, prepare_to_fork, tune

    close, init, update = Nanny.close, SpecCluster.__init__, SpecCluster._update_worker_status

    def init_if_marked(self, *args, **kwargs):
        assert may_start_clusters, "mark the test: pytest.mark.cluster"
        init(self, *args, **kwargs)

    async def close_patiently(self, timeout=30, reason="nanny-close"):
        """Dask's five seconds are too short for processes of a busy machine."""
        return await close(self, timeout, reason)

    def update_if_known(self, op, message):
        """Ignore the end of a worker whose start was not sent. Dask's method would raise."""
        if op != "remove" or message in self.scheduler_info["workers"]:
            update(self, op, message)

    prepare_to_fork()
    with pytest.MonkeyPatch.context() as patch, dask.config.set(FORKED | PATIENT | UNWATCHED):
        patch.setattr(Nanny, "close", close_patiently)
        patch.setattr(SpecCluster, "__init__", init_if_marked)
        patch.setattr(SpecCluster, "_update_worker_status", update_if_known)
        # On a busy machine, workers that have just started answer late, which is a warning.
        tune(patch, worker_answer_s=30.0)
        yield


@pytest.fixture(scope="session")
def common_cluster():
    """Four single-thread worker processes over TCP, shared by all tests that do no harm."""
    from distributed import LocalCluster

    from tests.support import import_path

    with LocalCluster(
        n_workers=4,
        threads_per_worker=1,
        protocol="tcp://",
        dashboard_address=":0",
        env={"PYTHONPATH": import_path()},
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(request):
    """The cluster of a module, made with the keywords in its `CLUSTER`, or the shared one."""
    from distributed import LocalCluster

    if (keywords := getattr(request.module, "CLUSTER", None)) is None:
        yield request.getfixturevalue("common_cluster")
    else:
        with LocalCluster(**{"dashboard_address": ":0", **keywords}) as cluster:
            yield cluster


@pytest.fixture
def client(cluster):
    """A client of the cluster, for one test."""
    from distributed import Client

    with Client(cluster) as client:
        yield client


@pytest.fixture
def without_stealing(client):
    """Let the scheduler move no task from the worker that it chose, for tests that count bytes."""

    async def stop(dask_scheduler):
        await dask_scheduler.extensions["stealing"].stop()

    async def start(dask_scheduler):
        await dask_scheduler.extensions["stealing"].start()

    client.run_on_scheduler(stop)
    yield
    client.run_on_scheduler(start)


@pytest.fixture
def own_log(caplog):
    """Log records of this package alone: a cluster in this process may log at any time."""

    def is_own(record):
        return "dask_p2p" in record.name or "dask_p2p" in record.getMessage()

    caplog.handler.addFilter(is_own)
    yield caplog
    caplog.handler.removeFilter(is_own)


@pytest.fixture
def sleeper():
    """A process that ends when it is killed."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def gpu(monkeypatch):
    """An emulated GPU that replaces CuPy, and checks the order of all accesses of memory."""
    from tests.simulation.streams import emulated

    return emulated(monkeypatch)


@pytest.fixture
def replayed(monkeypatch):
    """The streams whose graphs were launched: one for each launch on an emulated GPU."""
    from tests.simulation.streams import launches

    return launches(monkeypatch)


@pytest.fixture
def strict_cupy(monkeypatch):
    """A CuPy in host memory, which refuses conversions to NumPy as CuPy does."""
    from tests.simulation.strict_cupy import emulated_strictly

    return emulated_strictly(monkeypatch)


_THRESHOLD = "array.rechunk.threshold"
_THRESHOLD_OF_DASK = dask.config.get(_THRESHOLD)


@pytest.fixture(autouse=True)
def _threshold_of_dask():
    """Restore the option that `dask_array` changes, wherever a test before has imported it."""
    if dask.config.get(_THRESHOLD) != _THRESHOLD_OF_DASK:
        dask.config.set({_THRESHOLD: _THRESHOLD_OF_DASK})


@pytest.fixture
def dask_array(_threshold_of_dask):
    """The package of this name, with the options of Dask."""
    package = pytest.importorskip("dask_array", reason="needs it: pip install dask-array")
    dask.config.set({_THRESHOLD: _THRESHOLD_OF_DASK})
    return package


@pytest.fixture(params=["dask.array", "dask_array"])
def library(request):
    """A library of lazy arrays."""
    return dask.array if request.param == "dask.array" else request.getfixturevalue("dask_array")


@pytest.fixture(scope="module")
def loop():
    """An event loop in a thread, as a worker has one."""
    from tests.transports.loopback import EventLoop

    loop = EventLoop()
    yield loop
    loop.close()
