"""What may happen to gangs besides a worker that dies, on workers with one thread each."""

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from functools import partial

import dask.array as da
import numpy as np
import pytest
from distributed import Client

from dask_p2p import spmd
from dask_p2p.plugins.scheduler import P2PSchedulerPlugin
from dask_p2p.plugins.worker import P2PPlugin
from tests.sections.support import nothing_is_left, ranks_of
from tests.support import BOUND_S, restart, result_of
from tests.transports.loopback import wait_until

X = np.arange(96.0).reshape(8, 12)
CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def array():
    return da.from_array(X, chunks=(2, 12))


def stepping(ctx, x, steps=20, path=None, shift=0.0):
    s = ctx.state(x=x)
    for step in ctx.steps(steps, s, every=5):
        s.x = s.x + (ctx.allreduce(s.x.sum()) / 1e6 + shift)
        time.sleep(0.02)
        if path is not None and step == 3:
            path.touch()
    return s.x


def stepped(x=X, shift=0.0, steps=20):
    x = x.copy()
    for _ in range(steps):
        x += sum(x[i : i + 2].sum() for i in range(0, 8, 2)) / 1e6 + shift
    return x


@pytest.mark.slow
def test_cancels_at_any_time(client):
    pauses = np.random.default_rng(0).uniform(0, 0.4, 12)
    for number, pause_s in enumerate(pauses):
        y = spmd(stepping, array(), ranks=4, shift=number / 8).persist()
        time.sleep(pause_s)
        client.cancel(y)
    nothing_is_left(client)
    y = spmd(stepping, array(), ranks=4)
    assert np.array_equal(y.compute(), stepped())


@pytest.mark.parametrize("ranks", [1, 4])
def test_cancelled_ranks_end_at_their_step(client, tmp_path, ranks):
    """Their steps exchange nothing."""

    def endless(ctx, x):
        for _ in ctx.steps(None):
            (tmp_path / "runs").touch()

    y = spmd(endless, array(), ranks=ranks).persist()
    wait_until((tmp_path / "runs").exists)
    client.cancel(y)
    nothing_is_left(client)


def test_a_worker_that_leaves_and_one_that_comes(client, tmp_path):
    future = client.compute(spmd(stepping, array(), ranks=4, steps=60, path=tmp_path / "runs"))
    wait_until((tmp_path / "runs").exists)
    leaving = next(iter(client.nthreads()))
    client.retire_workers([leaving])
    client.cluster.scale(3)  # it still counts the one that leaves
    assert np.array_equal(result_of(client, future), stepped(steps=60))
    del future
    client.wait_for_workers(2)
    nothing_is_left(client)


@pytest.mark.slow
def test_a_restart(client, tmp_path):
    y = spmd(stepping, array(), ranks=4, steps=1000, path=tmp_path / "runs").persist()
    wait_until((tmp_path / "runs").exists)
    restart(client)
    del y
    nothing_is_left(client)
    assert np.array_equal(spmd(stepping, array(), ranks=4).compute(), stepped())


@pytest.fixture
def running(client, tmp_path):
    """A gang that runs: the future of what it makes, a worker, and its process."""
    client.wait_for_workers(2, timeout=BOUND_S)
    path = tmp_path / "runs"
    future = client.compute(spmd(stepping, array(), ranks=4, steps=60, path=path))
    wait_until(path.exists)
    pids = client.run(os.getpid, on_error="ignore")  # of one that just leaves
    victim = min(pids)
    yield future, victim, pids[victim]
    assert np.array_equal(result_of(client, future), stepped(steps=60))
    future.release()
    nothing_is_left(client)


def test_a_worker_that_stands_still_for_good(client, running):
    """Dask takes it off after `distributed.scheduler.worker-ttl`."""

    async def take_off(dask_scheduler):
        await dask_scheduler.remove_worker(victim, stimulus_id="test", close=False)

    future, victim, pid = running
    os.kill(pid, signal.SIGSTOP)
    try:
        client.run_on_scheduler(take_off)
        assert np.array_equal(result_of(client, future), stepped(steps=60))
    finally:
        os.kill(pid, signal.SIGKILL)  # the nanny starts another one


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [P2PPlugin, P2PSchedulerPlugin])
def test_a_plugin_that_is_taken_off(client, running, plugin):
    async def from_worker(dask_worker):
        await dask_worker.plugin_remove(plugin.name)

    if plugin is P2PPlugin:
        client.run(from_worker)
    else:
        client.unregister_scheduler_plugin(plugin.name)


@pytest.mark.slow
def test_workers_that_are_paused(client, running):
    """They begin no task, but their ranks go on."""
    future, victim, _ = running

    def set_fraction(fraction, dask_worker):
        before = dask_worker.memory_manager.memory_pause_fraction
        dask_worker.memory_manager.memory_pause_fraction = fraction
        return before

    def paused(dask_scheduler):
        return len(dask_scheduler.workers) - len(dask_scheduler.running)

    before = client.run(partial(set_fraction, 1e-9), workers=[victim])[victim]
    wait_until(lambda: client.run_on_scheduler(paused) == 1)
    result_of(client, future)
    assert client.run_on_scheduler(paused) == 1
    client.run(partial(set_fraction, before), workers=[victim])
    wait_until(lambda: client.run_on_scheduler(paused) == 0)


def test_a_client_that_dies(client, tmp_path):
    arguments = client.cluster.scheduler_address, tmp_path / "runs"
    process = multiprocessing.get_context("forkserver").Process(target=as_client, args=arguments)
    process.start()
    wait_until((tmp_path / "runs").exists)
    process.kill()
    process.join()
    nothing_is_left(client)


def as_client(address, path):
    with Client(address):
        spmd(stepping, array(), ranks=4, steps=10_000, path=path).compute()


def test_a_cancel_during_a_checkpoint(client, tmp_path):
    y = spmd(checkpointing, array(), ranks=4, folder=tmp_path).persist()
    wait_until(lambda: (tmp_path / "copying").exists())
    client.cancel(y)
    del y
    time.sleep(0.1)
    (tmp_path / "cancelled").touch()
    nothing_is_left(client)


def states(dask_worker):
    ranks = ranks_of(dask_worker)
    return ranks.saved.gangs if ranks else []


def test_an_error_that_somebody_keeps_keeps_no_states(client):
    """In a notebook it lasts for hours, and states are as large as local blocks."""

    def failing(ctx, x):
        ctx.checkpoints.save(1, [x])
        raise ValueError("too large")

    y = spmd(failing, array(), ranks=4).persist()
    with pytest.raises(ValueError, match="too large"):
        y.compute()
    wait_until(lambda: not any(client.run(states).values()))
    del y


def checkpointing(ctx, x, folder):
    """Rank 1 copies its second state after others have their copies, and after the cancel."""
    ctx.checkpoints.save(1, [x])
    copy, thread_id = ctx.device.copy_to_host, threading.get_ident()

    def copy_late(*args):
        if threading.get_ident() == thread_id:
            (folder / "copying").touch()
            wait_until((folder / "cancelled").exists)
        copy(*args)

    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(ctx.device, "copy_to_host", copy_late)
        ctx.checkpoints.save(2, [x])
    return x


def test_a_function_that_keeps_the_lock(client):
    """Python's: its worker does not answer meanwhile."""

    def keeping(ctx, x):
        ctx.barrier()
        if ctx.rank == 1:
            ctypes.PyDLL(None).usleep(1_500_000)
        return x + ctx.allreduce(1.0)

    assert np.array_equal(spmd(keeping, array(), ranks=4).compute(), X + 4)
    nothing_is_left(client)
