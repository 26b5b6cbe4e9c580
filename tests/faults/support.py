"""Clusters to do harm to, and traps: what happens to a worker when it gets to some moment."""

import functools
import itertools
import os
import signal
from contextlib import contextmanager
from glob import glob
from pathlib import Path

import dask
import dask.array as da
import numpy as np
from distributed import Client, Future, LocalCluster, Status, wait

import dask_p2p
from dask_p2p.engine.assembly import Assembly
from dask_p2p.engine.remote import RemoteSources
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.plugins.context import DaskWorkerContext
from dask_p2p.plugins.registration import workers_of
from dask_p2p.transports.same_host import SameHostTransport
from dask_p2p.transports.ucx import UcxSendBuffer
from tests.support import BOUND_S, FORKED, prepare_to_fork
from tests.transports.loopback import wait_until
from tests.usage import usage_of_worker

CLOSING = {Status.closing_gracefully, Status.closing}  # which takes Dask two seconds


@contextmanager
def cluster_of(n_workers, options=None, **kwargs):
    """Start worker processes of one thread each; give a client whose cluster has the plugin."""
    prepare_to_fork()
    quick = {"scheduler_kwargs": {"dashboard": False}, "dashboard_address": ":0"}
    kwargs = {"threads_per_worker": 1, "silence_logs": 50} | quick | kwargs
    settings = FORKED | {
        "distributed.scheduler.work-stealing": False,  # tasks stay where the test put them
        "p2p.transports.directory.retain": "100 ms",  # so that tests wait for it only shortly
    }
    with (
        dask.config.set(settings | (options or {})),
        LocalCluster(n_workers=n_workers, **kwargs) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(n_workers, timeout=BOUND_S)
        dask_p2p.register(client)
        yield client


@contextmanager
def as_new(client, n_workers):
    """Give a client that tests share; restore the number of workers, without tasks or failures.

    Nannies replace workers that were killed; others take the places of those that were closed.
    """
    try:
        yield client
    finally:
        # Errors keep their stack frames, and these keep futures.
        client.cancel([Future(key, client) for key in list(client.futures)])
        wait_until(lambda: task_count(client) == 0, BOUND_S)
        try:
            wait_until(lambda: _is_complete(client, n_workers), BOUND_S / 2)
        except AssertionError:
            _replace_missing(client)
            wait_until(
                lambda: _is_complete(client, n_workers), BOUND_S, lambda: _state_of(client.cluster)
            )
        wait_until(lambda: _have_no_records(client, n_workers), BOUND_S)


def _is_complete(client, n_workers):
    """Return whether all workers are there; start new ones for those that were closed."""
    cluster, closing = client.cluster, 0
    for name, nanny in list(cluster.workers.items()):
        if nanny.status == Status.closed:
            _drop(cluster, name)
        closing += nanny.status in CLOSING
    if len(cluster.worker_spec) != n_workers + closing:  # each call starts a comparison
        cluster.scale(n_workers + closing)
    return len(addresses(client)) == n_workers


def _replace_missing(client):
    """Replace workers that nannies did not restart, as happens on a busy machine."""
    present = set(addresses(client))
    for name, nanny in list(client.cluster.workers.items()):
        if nanny.worker_address not in present:
            _drop(client.cluster, name)


def _drop(cluster, name):
    """Have a cluster close a nanny. Another one of its name would not be started."""
    cluster.worker_spec.pop(name, None)
    cluster._i = max(cluster._i, name + 1)


def _state_of(cluster):
    """The workers of a cluster: those that it is to have, and its nannies with their states."""
    nannies = {
        name: (nanny.status, nanny.worker_address) for name, nanny in cluster.workers.items()
    }
    return f"specified: {[*cluster.worker_spec]}, there: {nannies}"


def task_count(client):
    return client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))


def _have_no_records(client, n_workers):
    """Return whether these workers have dropped all records of others.

    A worker that leaves may lack the plugin, and answers with an error.
    """
    replies = client.run(_forget_others, addresses(client), on_error="return")
    return [*replies.values()] == [True] * n_workers


def _forget_others(gone_addresses, dask_worker):
    for address in gone_addresses:
        dask_worker.plugins[PLUGIN_NAME].context.router.on_worker_left(address)
    return True


def addresses(client):
    return sorted(workers_of(client))


def source(shape, chunks, dtype=float):
    """An array whose elements are their positions; any worker can compute its blocks again."""
    return da.fromfunction(
        functools.partial(_positions, shape), shape=shape, chunks=chunks, dtype=dtype
    )


def _positions(shape, *indices):
    position = np.zeros_like(indices[0])
    for length, index in zip(shape, indices, strict=True):
        position = position * length + index
    return position


def expected(shape, dtype=float):
    """The values of `source`."""
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def one_block_each(client, x, workers):
    """Start to make one row of x's blocks on each of these workers, in their order."""
    rows = [
        client.persist(x.blocks[i], workers=[worker], allow_other_workers=True)
        for i, worker in enumerate(workers)
    ]
    return client.persist(da.concatenate(rows))


def slabs(client, shape, workers=None):
    """`source` in memory, in a slab of rows on each of these workers; by default on all."""
    workers = workers or addresses(client)
    x = one_block_each(client, source(shape, (shape[0] // len(workers), shape[1])), workers)
    wait(x)
    return x


def check_transposed(client, y, shape):
    """Check the transpose of `source`, and that nothing is held after it."""
    np.testing.assert_array_equal(client.compute(y).result(timeout=BOUND_S), expected(shape).T)
    assert_nothing_is_held(client)


def pid_of(client, worker):
    return client.run(os.getpid, workers=[worker])[worker]


def wait_until_gone(client, worker):
    wait_until(lambda: worker not in addresses(client), BOUND_S)


def kill(client, worker):
    os.kill(pid_of(client, worker), signal.SIGKILL)
    wait_until_gone(client, worker)


@contextmanager
def halted(client, worker):
    pid = pid_of(client, worker)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def count_resources(client):
    """Resources that transfers hold on each worker; a worker that leaves need not answer."""
    replies = client.run(
        lambda dask_worker: usage_of_worker(dask_worker.plugins[PLUGIN_NAME].context),
        on_error="return",
    )
    return {worker: counts for worker, counts in replies.items() if not isinstance(counts, OSError)}


def assert_nothing_is_held(client):
    """Immediately, or after the last answers."""
    wait_until(lambda: not any(any(counts.values()) for counts in count_resources(client).values()))


def forget(client, future):
    """Wait until the scheduler has dropped a transpose: another of its key would end as it did."""
    future.release()
    wait_until_forgotten(client)


def wait_until_forgotten(client):
    def keys(dask_scheduler):
        return str([*dask_scheduler.tasks])

    wait_until(lambda: "p2p-transpose" not in client.run_on_scheduler(keys), BOUND_S)


def attempts(dask_worker):
    """The tasks that failed on a worker, and will be tried again."""
    return dask_worker.plugins[PLUGIN_NAME].context.failed


class Gate:
    """Stops a worker's thread in the middle of a task, until the test opens it.

    It consists of files, since the two are in different processes.
    """

    def __init__(self, folder):
        self.path = os.path.join(folder, "gate")

    def wait_until_reached(self, by=1):
        wait_until(lambda: len(glob(f"{self.path}.reached.*")) >= by, BOUND_S)

    def open(self):
        Path(f"{self.path}.open").touch()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.open()  # always: a thread that waits would keep its worker from closing


def wait_at(path):
    Path(f"{path}.reached.{os.getpid()}").touch()
    wait_until(Path(f"{path}.open").exists, BOUND_S)


# --- traps, set by `client.run` on the worker that they are for ---


def spring(dask_worker, act, argument):
    if act == "kill":
        os.kill(os.getpid() if argument is None else argument, signal.SIGKILL)
    elif act == "close":
        dask_worker.loop.add_callback(dask_worker.close_gracefully)
    elif act == "halt":
        os.kill(argument, signal.SIGSTOP)
    elif act == "wait":
        wait_at(argument)
    else:
        raise ValueError(act)


def set_trap(moment, number, act, argument=None, *, dask_worker):
    """Do something when this worker gets to a moment for the n-th time, counted from 1.

    Moments: ``asked`` for a region of comm, before it answers; ``publishing`` a block, by ipc or
    cma; ``sending`` a message of ucx; ``started`` a task, before its first pull; ``placed`` a part
    of a region, in its output; ``complete``, when all parts of a task are placed.

    Acts: ``kill`` (SIGKILL) or ``close`` (gracefully) this worker, ``kill`` or ``halt`` (SIGSTOP)
    the process with the id `argument`, or ``wait`` in the task's thread, at the gate of that path.
    """
    counter = itertools.count(1)

    def passing():
        if next(counter) == number:
            spring(dask_worker, act, argument)

    if moment == "asked":
        serve = dask_worker.handlers["p2p_comm_read"]

        async def spring_trap(**kwargs):
            passing()
            return await serve(**kwargs)

        dask_worker.handlers["p2p_comm_read"] = spring_trap
        return
    owner, name = {
        "publishing": (SameHostTransport, "publish_block"),
        "sending": (UcxSendBuffer, "start"),
        "started": (DaskWorkerContext, "publish"),
        "placed": (Assembly, "_place_first"),
        "complete": (RemoteSources, "close"),
    }[moment]
    function = getattr(owner, name)

    @functools.wraps(function)
    def passed(*args, **kwargs):
        if moment == "placed":
            result = function(*args, **kwargs)
        passing()
        return result if moment == "placed" else function(*args, **kwargs)

    setattr(owner, name, passed)
