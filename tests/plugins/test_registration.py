"""How the plugins get onto clusters, and what happens where they cannot."""

import os
import re
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager
from unittest.mock import AsyncMock, Mock

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Event, LocalCluster, get_client, wait, worker_client

import dask_p2p
from dask_p2p.engine import task as task_module
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import P2PWarning, RegistrationError
from dask_p2p.plugins import dask_internals as notices
from dask_p2p.plugins import registration as module
from dask_p2p.plugins.registration import workers_of
from tests.faults.support import halted
from tests.support import (
    BOUND_S,
    import_path,
    indexed,
    noted,
    restart,
    result_of,
    spread,
    tune,
    worker_process,
)
from tests.transports.loopback import true_later, wait_until

SHAPE = (40, 12)
X = indexed(SHAPE)


@pytest.fixture(scope="module")
def own_cluster():
    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", env={"PYTHONPATH": import_path()}
    ) as cluster:
        yield cluster


@pytest.fixture
def bare(own_cluster):
    """A client of a cluster as it is before anybody registers."""
    with Client(own_cluster) as client:
        client.run_on_scheduler(_take_off)
        client.run(_forget)
        yield client


async def _take_off(dask_scheduler):
    if PLUGIN_NAME in dask_scheduler.worker_plugins:
        await dask_scheduler.unregister_worker_plugin(None, PLUGIN_NAME)
    if PLUGIN_NAME in dask_scheduler.plugins:
        dask_scheduler.remove_plugin(PLUGIN_NAME)


async def _forget(dask_worker):
    if PLUGIN_NAME in dask_worker.plugins:  # of a preload
        await dask_worker.plugin_remove(name=PLUGIN_NAME)
    for workers in (notices.warned, module.askers):
        workers.discard(dask_worker)


def _has_plugin(dask_worker):
    return task_module.plugin_context(dask_worker) is not None


def have_plugin(client):
    return all(client.run(_has_plugin).values())


def lazy():
    return dask_p2p.transpose(da.from_array(X, chunks=(10, 12)))


def check(client, y):
    np.testing.assert_array_equal(result_of(client, client.compute(y)), X.T)


def test_transpose_registers_once_with_each_client(client, monkeypatch):
    requests = noted(monkeypatch, module, "ask", lambda scheduler: scheduler)
    for _ in range(3):
        lazy()
    assert len(requests) == 1


def test_workers_are_seen_though_the_client_asks_for_none_meanwhile(client, monkeypatch):
    sync = client.sync

    def with_a_periodic_look(function, *args, **kwargs):
        result = sync(function, *args, **kwargs)
        sync(client._update_scheduler_info, n_workers=0)
        return result

    monkeypatch.setattr(client, "sync", with_a_periodic_look)
    assert client.scheduler_info(n_workers=-1)["workers"] == {}, "what this is about"
    assert len(workers_of(client)) == 4


def test_register_without_a_client():
    with pytest.raises(ValueError, match=r"(?i)client"):
        dask_p2p.register()


def test_a_plugin_that_is_there_stays(bare):
    """A second call, or client, has nothing taken off, under whose tasks ever."""
    dask_p2p.register(bare)

    def identity(dask_worker):
        return id(dask_worker.plugins[PLUGIN_NAME])

    before = bare.run(identity)
    dask_p2p.register()
    with Client(bare.cluster) as second_client:
        dask_p2p.register(second_client)
    assert bare.run(identity) == before


@pytest.mark.slow
def test_a_worker_that_stands_still_is_not_waited_for(bare, monkeypatch):
    tune(monkeypatch, worker_answer_s=5.0)
    still, _ = workers_of(bare)
    with halted(bare, still):
        is_done = threading.Event()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            thread = threading.Thread(target=lambda: (lazy(), is_done.set()), daemon=True)
            thread.start()
            assert is_done.wait(BOUND_S), "it waits for the worker"
        (warning,) = [w for w in caught if w.category is P2PWarning]
        # A busy machine may make the other worker late, too.
        assert re.match(
            "[12] of 2 workers have not answered the registration for 5 s: they are busy or "
            rf"suspended \(.*{still}.*\)\. Tasks sent there wait until they answer\. Close workers",
            str(warning.message),
        )
    wait_until(lambda: have_plugin(bare))


def answering(reply):
    """A scheduler that answers so whoever registers."""
    return Mock(register_scheduler_plugin=AsyncMock(), p2p_register=AsyncMock(return_value=reply))


async def test_a_warning_of_many_workers_names_some():
    workers = [f"tcp://w{i}" for i in range(9)]
    scheduler = answering({"status": "ok", "failed": {}, "silent": workers, "workers": 12})
    client = Mock(spec=Client, asynchronous=True, scheduler=scheduler, status="running")
    client.scheduler_comm, client.sync = None, lambda function, client: function(client)
    named = r"^9 of 12 workers .* \(tcp://w0, .*tcp://w3, \.\.\.\)"
    with pytest.warns(P2PWarning, match=named):
        await dask_p2p.register(client)


def test_a_graph_that_is_older_than_the_client(own_cluster):
    y = lazy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Client(own_cluster) as bare:
            bare.run_on_scheduler(_take_off)
            bare.run(_forget)
            x = spread(bare, da.from_array(X, chunks=(10, 12)))
            check(bare, y)
            del x
            wait_until(lambda: have_plugin(bare))
            wait_until(lambda: any("whole blocks" in str(w.message) for w in caught))
    texts = [str(w.message) for w in caught if "whole blocks" in str(w.message)]
    assert len(texts) <= 2, "each worker says it once"
    assert all("B were moved as whole blocks to tcp://" in text for text in texts)


@pytest.mark.parametrize("how", [worker_client, None])
def test_within_a_task(bare, how):
    def task():
        if how is None:
            y = lazy()
            get_client()
            return _has_plugin(task_module.current_worker()[0]), y.shape
        with worker_client():
            y = lazy()
            return _has_plugin(task_module.current_worker()[0]), y.compute().shape

    future = bare.submit(task, pure=False)
    assert result_of(bare, future) == (True, SHAPE[::-1])
    assert have_plugin(bare)


async def test_an_asynchronous_client_registers_meanwhile(bare):
    async with Client(bare.cluster.scheduler_address, asynchronous=True) as client:
        y = lazy()

        async def all_have_it():
            return all((await client.run(_has_plugin)).values())

        await true_later(all_have_it)
        np.testing.assert_array_equal(await client.compute(y), X.T)


async def test_no_warning_for_an_asynchronous_client_that_is_closed_meanwhile(monkeypatch):
    monkeypatch.setattr(module, "ask", AsyncMock(side_effect=OSError("Stream is closed")))
    with pytest.warns(P2PWarning, match="Stream is closed"):
        await module.register_later(Mock(status="running"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await module.register_later(Mock(status="closing"))


def _lack_package(dask_worker):
    """Make this process one where the package is not installed."""

    class Nothing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == "dask_p2p":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "dask_p2p"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Nothing)


def test_a_worker_without_the_package_is_named_and_not_lost(bare):
    older = lazy()
    precious = bare.scatter({"a": 1, "b": 2}, broadcast=True)
    lacking, *_ = sorted(workers_of(bare))
    bare.run(_lack_package, workers=[lacking])
    try:
        for _ in range(2):
            with pytest.raises(RegistrationError, match=f"got worker {lacking}: .*No module named"):
                dask_p2p.register(bare)
        future = bare.compute(older, workers=[lacking], allow_other_workers=False)
        with pytest.raises(RegistrationError, match=lacking):
            result_of(bare, future)
        bare.cancel(future)  # or it would be the same task that is asked for again
        assert lacking in workers_of(bare)
        assert bare.gather(precious) == {"a": 1, "b": 2}
    finally:
        del precious
        restart(bare, [lacking])
    dask_p2p.register(bare)
    check(bare, lazy())


def test_the_plugin_is_taken_off_while_tasks_wait(bare):
    """They have references, which nobody can follow any more."""
    x = bare.persist(da.from_array(X, chunks=(10, 12)))
    wait(x)
    gate = Event("gate", client=bare)
    holding = [
        bare.submit(lambda: Event("gate").wait(), pure=False, workers=[worker], priority=9)
        for worker in workers_of(bare)
    ]
    dask_p2p.register(bare)
    y = bare.compute(dask_p2p.transpose(x))
    wait_until(lambda: sum(bare.run(_waiting).values()) >= 2)
    bare.unregister_worker_plugin(PLUGIN_NAME)
    gate.set()
    np.testing.assert_array_equal(result_of(bare, y), X.T)
    del holding


def _waiting(dask_worker):
    """Count the tasks with references that wait for a thread."""
    return sum(
        any(isinstance(item, task_module.BlockRef) for item in ts.run_spec.blocks.items)
        for ts in dask_worker.state.tasks.values()
        if ts.state == "ready" and isinstance(ts.run_spec, task_module.AssembleTask)
    )


OF_WORKER = (False, 64 * 2**20, 3.0)
VARIABLES = {
    "DASK_P2P__TRANSPORTS__UCX__ALLOW_UNENCRYPTED": "False",
    "DASK_P2P__MEMORY__STAGING_LIMIT": "64 MiB",
    "DASK_P2P__TRANSPORTS__DIRECTORY__RETAIN": "3 s",
}
OF_CLIENT = {
    "p2p.transports.ucx.allow-unencrypted": True,
    "p2p.memory.staging-limit": "3 GiB",
    "p2p.transports.directory.retain": "1 s",
}


def _own_options(dask_worker):
    plugin = dask_worker.plugins[PLUGIN_NAME]
    options = plugin.options
    chosen = options.allow_unencrypted, options.staging_limit_bytes, options.retain_blocks_s
    budgets = {
        transport.packed.limit_bytes for transport in plugin.context.router.transports.values()
    }
    return chosen, id(plugin), budgets, sys.getswitchinterval()


@pytest.mark.slow
def test_workers_keep_their_own_options():
    with (
        LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        worker_process(cluster.scheduler_address, "--preload", "dask_p2p.preload", **VARIABLES),
    ):
        client.wait_for_workers(1, timeout=BOUND_S)
        wait_until(lambda: have_plugin(client))
        (before,) = client.run(_own_options).values()
        with worker_process(cluster.scheduler_address, **VARIABLES), dask.config.set(OF_CLIENT):
            client.wait_for_workers(2, timeout=BOUND_S)
            dask_p2p.register(client)
            check(client, lazy())
            after = client.run(_own_options).values()
            assert before in after, "the plugin that was there is there"
            for chosen, _, budgets, switch_s in after:
                assert chosen == OF_WORKER
                assert budgets == {64 * 2**20}
                assert switch_s == 0.005


async def test_a_scheduler_that_refuses_is_an_error():
    scheduler = answering({"status": "error", "message": "OSError: too many open files"})
    with pytest.raises(RegistrationError, match="too many open files"):
        await module.ask(scheduler)


@contextmanager
def hand_made_cluster(port, workers, limit):
    """A scheduler at this port and its workers, as their commands start them."""
    command = [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--no-dashboard"]
    env = {**os.environ, "PYTHONPATH": import_path()}
    with (
        subprocess.Popen(
            [*command, "--port", str(port)], env=env, stderr=subprocess.DEVNULL
        ) as scheduler,
        ExitStack() as stack,
    ):
        address = f"tcp://127.0.0.1:{port}"
        for _ in range(workers):
            stack.enter_context(worker_process(address, "--memory-limit", limit))
        stack.callback(scheduler.kill)
        yield address


@pytest.mark.slow
@pytest.mark.cluster
def test_the_same_client_after_a_restart_of_its_scheduler():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    blocks = da.ones((8000, 6875), chunks=(500, 6875)).map_blocks(np.copy)
    with hand_made_cluster(port, 4, "400 MB") as address:
        client = Client(address, timeout=BOUND_S)
        client.wait_for_workers(4, timeout=BOUND_S)
        dask_p2p.transpose(blocks)
        assert have_plugin(client)
    wait_until(lambda: client.status != "running")
    try:
        with hand_made_cluster(port, 4, "400 MB"):
            wait_until(lambda: client.status == "running")
            client.wait_for_workers(4, timeout=BOUND_S)
            y = dask_p2p.transpose(blocks, chunks=(430, 8000))
            assert y.sum().compute() == 8000 * 6875
    finally:
        client.close()
