"""Private parts of Dask that this package replaces or reads, as it knows them.

Where one of these tests fails with a new release of Dask, look at what has changed there, and at
what relies on it here, before the range of releases is raised.
"""

import inspect
import threading
from dataclasses import fields
from importlib import metadata
from itertools import count
from pathlib import Path

import dask
import dask.array as da
import distributed
import numpy as np
import pytest
from dask.task_spec import GraphNode
from distributed import Scheduler, SchedulerPlugin, Worker, get_worker, wait
from distributed.scheduler import ALL_TASK_STATES, SchedulerState, TaskGroup, TaskState, WorkerState
from distributed.spill import SpillBuffer
from distributed.threadpoolexecutor import ThreadPoolExecutor, thread_state
from distributed.worker import WORKER_ANY_RUNNING
from distributed.worker import thread_state as task_state
from distributed.worker_state_machine import SecedeEvent
from distributed.worker_state_machine import TaskState as WorkerTaskState
from zict import Buffer, Cache, File, Func

import dask_p2p
from dask_p2p import versions
from dask_p2p.engine.task import AssembleTask
from dask_p2p.errors import RegistrationError
from dask_p2p.plugins.dask_internals import PROFILE
from dask_p2p.plugins.registration import workers_of
from tests.support import BOUND_S, noted, own_client

#: A scheduler and workers in this process, into which tests can look.
CLUSTER = {"n_workers": 2, "threads_per_worker": 1, "processes": False}
#: What is replaced, with its parameters: see dask_p2p/plugins/placement.py.
METHODS = {
    "_add_to_processing": ["ts", "ws", "stimulus_id"],
    "decide_worker_non_rootish": ["ts"],
    "is_rootish": ["ts"],
    "worker_objective": ["ts", "ws"],
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_the_scheduler(name):
    assert [*inspect.signature(getattr(Scheduler, name)).parameters] == ["self", *METHODS[name]]


def test_the_method_of_the_client_that_sends_graphs():
    """See dask_p2p/fusing/option.py."""
    parameters = [*inspect.signature(distributed.Client._graph_to_futures).parameters]
    assert parameters[:3] == ["self", "expr", "keys"]
    assert {"workers", "resources", "retries", "user_priority"} <= {*parameters}


def test_the_scheduler_calls_what_is_replaced(client):
    """It looks them up on itself, at each call; else what takes their place is never called."""
    dask_p2p.register(client)
    scheduler = client.cluster.scheduler
    with pytest.MonkeyPatch.context() as patch:
        calls = {
            name: noted(patch, scheduler, name, lambda *args, **kwargs: args) for name in METHODS
        }
        x = client.submit(lambda: 1, pure=False)
        client.submit(lambda value: value, x, pure=False).result(timeout=BOUND_S)
        left_block, right = (
            client.scatter(i, workers=[w]) for i, w in enumerate(workers_of(client))
        )
        client.submit(lambda *values: values, left_block, right, pure=False).result(timeout=BOUND_S)
    assert all(calls.values()), calls


def test_the_message_that_a_worker_gets_for_a_task(client):
    """The one that the worker's plugin changes: see `dask_p2p.plugins.worker.P2PPlugin`."""
    dask_p2p.register(client)
    messages = []
    workers = list(client.cluster.workers.values())
    with pytest.MonkeyPatch.context() as patch:
        for worker in workers:
            original = worker.stream_handlers["compute-task"]

            def spy(original=original, **message):
                messages.append(message)
                original(**message)

            patch.setitem(worker.stream_handlers, "compute-task", spy)
        x = da.ones((4, 6), chunks=(1, 6)).persist()
        wait(x)
        y = dask_p2p.transpose(x).persist()
        wait(y)
    our_messages = [
        message for message in messages if isinstance(message["run_spec"], AssembleTask)
    ]
    assert len(our_messages) == 4
    for message in our_messages:
        assert isinstance(message["run_spec"], GraphNode)
        assert set(message["who_has"]) == set(message["nbytes"])
        assert len(message["who_has"]) == 4
        addresses = {worker.address for worker in workers}
        assert all(set(holders) <= addresses for holders in message["who_has"].values())
        assert all(type(nbytes) is int for nbytes in message["nbytes"].values())


def test_parts_of_the_dashboard_that_are_used(client):
    """See `dask_p2p.monitoring.dashboard`; `applications` are those of Dask's own pages."""
    pytest.importorskip("bokeh")
    from bokeh.server.tornado import BokehTornado
    from distributed.dashboard.scheduler import applications, template_variables

    dask_p2p.register(client)
    scheduler = client.cluster.scheduler
    variables = template_variables(scheduler)
    assert variables is template_variables(scheduler), "kept for all pages"
    assert {"status", "p2p"} <= set(variables["pages"])
    assert all(set(plot) == {"url", "name"} for plot in variables["plots"])
    dashboard, own_pages = (
        app for app in scheduler.http_application.applications if isinstance(app, BokehTornado)
    )
    assert own_pages.app_paths == set(own_pages._applications)
    assert dashboard.app_paths == set(applications) | own_pages.app_paths


def test_parts_of_states_that_are_used():
    """See `dask_p2p.plugins.placement`, and of gangs `seating`, `gathering` and `waiting`."""
    for cls, names in {
        SchedulerState: ("workers", "tasks", "task_groups", "running", "valid_workers"),
        TaskGroup: ("states",),
        TaskState: (
            *("run_spec", "key", "run_id", "dependencies", "dependents"),
            *("who_has", "processing_on", "get_nbytes", "state", "suspicious", "waiting_on"),
            *("worker_restrictions", "host_restrictions", "resource_restrictions"),
            *("loose_restrictions", "exception", "exception_text", "exception_blame", "erred_on"),
        ),
        WorkerTaskState: ("run_id", "resource_restrictions"),
        WorkerState: (
            *("memory_limit", "occupancy", "nthreads", "nbytes", "address", "host", "status"),
            *("executing", "processing", "long_running", "resources"),
        ),
    }.items():
        attributes = {*dir(cls), *getattr(cls, "__annotations__", ())}
        assert set(names) <= attributes, cls
    assert {"waiting", "no-worker", "queued", "processing", "forgotten"} <= set(ALL_TASK_STATES)
    assert [*inspect.signature(Worker.plugin_add).parameters][:2] == ["self", "plugin"]


@pytest.mark.parametrize("release", ["2024.12.1", "2099.1.0", "2099.1.0+3.gabc"])
def test_a_release_outside_of_the_range_is_named(monkeypatch, release):
    pretend(monkeypatch, release)
    with pytest.raises(RegistrationError) as caught:
        versions.check_dask()
    for part in (release, versions.DASK_RELEASES, "pip install 'distributed>="):
        assert part in str(caught.value)


@pytest.mark.parametrize("release", ["2026.7.1", "2026.7.1+3.gabc", "2026.7.2a1"])
def test_a_release_within_the_range(monkeypatch, release):
    pretend(monkeypatch, release)
    versions.check_dask()


def pretend(monkeypatch, release):
    """Have this process seem to have another release of Dask."""
    real = metadata.version

    def version(name):
        return release if name == "distributed" else real(name)

    monkeypatch.setattr(versions.metadata, "version", version)


def test_registration_is_refused_outside_of_the_range(monkeypatch):
    """Wherever that release is: here they are all one process."""
    with own_client(1, processes=False) as client:
        real = versions.check_dask
        for outdated in (0, 1, 2):  # the client, the scheduler, the worker
            numbers = count()

            def check(outdated=outdated, numbers=numbers):
                with pytest.MonkeyPatch.context() as patch:
                    if next(numbers) == outdated:
                        pretend(patch, "2024.1.0")
                    real()

            for module in ("registration", "scheduler", "worker"):
                monkeypatch.setattr(f"dask_p2p.plugins.{module}.check_dask", check)
            with pytest.raises(RegistrationError, match=r"got .*distributed 2024\.1\.0"):
                dask_p2p.register(client)
            assert next(numbers) == outdated + 1
        monkeypatch.undo()
        dask_p2p.register(client)
        assert client.submit(lambda: 1).result(timeout=BOUND_S) == 1


def test_dask_serializes_cupy_blocks_as_is_expected():
    """`dask_p2p.plugins.storage` reads that. The module needs CuPy: its text is looked at."""
    package = Path(distributed.__file__).parent
    text = (package / "protocol" / "cupy.py").read_text("utf-8")
    for line in (
        "header = x.__cuda_array_interface__.copy()",
        'header["strides"] = tuple(x.strides)',
        "frames = [memoryview(cupy.asnumpy(f)) for f in frames]",
    ):
        assert line in text
    text = (package / "protocol" / "serialize.py").read_text("utf-8")
    for line in ('"sub-header": sub_header', '"type": type_name', '"serializer": "dask"'):
        assert line in text


def test_the_levels_of_dasks_store(tmp_path):
    """`dask_p2p.plugins.storage` reads them, maps the files, and has a function called."""
    data = SpillBuffer(str(tmp_path), target=10**6)
    assert isinstance(data, Buffer)
    events = []
    data.fast_to_slow_callbacks.append(lambda key, value: events.append(key))
    data["key", 0] = values = np.arange(1000)
    assert data.memory["key", 0] is values
    data.evict()
    assert events == [("key", 0)]
    assert isinstance(data.disk, Cache)
    assert data.disk.cache["key", 0] is values
    files = data.disk.data
    assert isinstance(files, Func)
    assert isinstance(files.d, File)
    content = (Path(files.d.directory) / files.d.filenames["key", 0]).read_bytes()
    np.testing.assert_array_equal(files.load(memoryview(content)), values)


def test_threads_of_a_pool():
    """They stay as long as they are told to go on: see dask_p2p/plugins/dask_internals.py."""

    def read_pool_state():
        is_listed = threading.current_thread() in thread_state.executor._threads
        return thread_state.executor, thread_state.proceed, is_listed

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(read_pool_state).result() == (pool, True, True)


def test_what_sections_read_of_the_scheduler_and_of_workers(client):
    """See dask_p2p/plugins/placement.py, and `gathering`, `units` and `threads` of gangs."""
    dask_p2p.register(client)
    scheduler = client.cluster.scheduler
    assert callable(scheduler.handlers["adaptive_target"])
    assert callable(scheduler.coerce_hostname)
    (worker, *_) = client.cluster.workers.values()
    assert worker.state.available_resources == {}
    state = scheduler.workers[worker.address]
    assert state.resources == state.executing == {}
    assert not state.long_running

    executor = worker.executors["default"]
    assert {"_max_workers", "_threads", "_adjust_thread_count"} <= {*dir(executor)}


def test_gangs_change_the_states_of_tasks():
    """See `gathering` and `scheduler` of dask_p2p/plugins/gangs."""
    signature = inspect.signature(Scheduler.transitions)
    assert [*signature.parameters] == ["self", "recommendations", "stimulus_id"]
    assert ("waiting", "erred") not in SchedulerState._TRANSITIONS_TABLE, "by way of released"
    for move in (("released", "erred"), ("processing", "released"), ("memory", "released")):
        assert move in SchedulerState._TRANSITIONS_TABLE
    signature = inspect.signature(SchedulerPlugin.update_graph)
    assert {"client", "tasks"} <= {*signature.parameters}
    assert [*inspect.signature(SchedulerPlugin.log_event).parameters] == ["self", "topic", "msg"]


def test_a_worker_takes_the_event_of_a_thread_that_leaves():
    """See dask_p2p/plugins/dask_internals.py."""
    names = {field.name for field in fields(SecedeEvent)}
    assert {"key", "compute_duration", "stimulus_id"} <= names
    assert callable(Worker.handle_stimulus)


def read_by_a_rank():
    worker = get_worker()
    task = worker.state.tasks[task_state.key]
    return task_state.start_time > 0, task.resource_restrictions, worker.scheduler is not None


def test_what_ranks_read_in_their_thread_and_of_their_worker(client):
    """See `threads` and `units` of dask_p2p/plugins/gangs, and `worker` of sections."""
    dask_p2p.register(client)
    assert client.submit(read_by_a_rank, pure=False).result(timeout=BOUND_S) == (True, None, True)
    (worker, *_) = client.cluster.workers.values()
    assert worker.status in WORKER_ANY_RUNNING
    assert callable(worker.security.get_listen_args)


def test_the_profiler_of_a_worker():
    """See dask_p2p/plugins/dask_internals.py: Dask reads the interval at each sample."""
    profiled = dask.config.set({"distributed.worker.profile.enabled": True})
    with profiled, own_client(1, processes=False) as second_client:
        (worker,) = second_client.cluster.workers.values()
        assert worker.periodic_callbacks[PROFILE].callback_time == 10
