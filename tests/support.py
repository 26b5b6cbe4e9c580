"""Clusters, arrays and checks for several test modules."""

import importlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import dask
import numpy as np
from dask.core import flatten
from dask.task_spec import Alias

from dask_p2p import tuning
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring.runs import fetch_records, runs_of
from dask_p2p.plugins.registration import workers_of

#: Limit in seconds for everything that must end, also on a busy machine.
BOUND_S = 120.0
#: Dask's configuration for workers that are forked off a server, which `prepare_to_fork` sets up.
FORKED = {"distributed.worker.multiprocessing-method": "forkserver"}
#: On a busy machine a nanny may take longer than Dask's 15 s to bring a worker back. The cluster
#: then closes it, and starts no other one.
PATIENT = {"distributed.deploy.lost-worker-timeout": "5 minutes"}
#: For servers that do not profile themselves every few milliseconds: idle ones take a fifth.
UNWATCHED = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500 ms",
}


def prepare_to_fork():
    """Fork workers off a server that has imported everything: a tenth of the time."""
    from distributed.utils import get_mp_context

    with dask.config.set(FORKED):
        context = get_mp_context()  # which sets Dask's own preloads, once
    context.set_forkserver_preload(["tests.forked"])


def tune(patch, **numbers):
    """Replace numbers of the package, until the patch is undone."""
    patch.setattr(tuning, "current", replace(tuning.current, **numbers))


def tune_here(**numbers):
    """Replace numbers of this process, such as a worker, until its end."""
    tuning.current = replace(tuning.current, **numbers)


def noted(patch, owner, name, note):
    """Return a list that gets what `note` returns for the arguments of each call of a function.

    `owner` is its class or module.
    """
    notes, original = [], getattr(owner, name)

    def call(*args, **kwargs):
        notes.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    patch.setattr(owner, name, call)
    return notes


def loaded_anew(name):
    """Return a new module of the same code, without state. Other modules keep the old one."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_path():
    """This process' import path, as a value of PYTHONPATH for processes that it starts."""
    return ":".join(filter(None, sys.path))


def ran(*arguments, cwd=None, stdin=None, **variables):
    """Return an ended process of Python with its output; it imports from the paths of this one."""
    env = {**os.environ, "PYTHONPATH": import_path(), **variables}
    return run_command(sys.executable, *arguments, env=env, cwd=cwd, input=stdin)


def output_of(*arguments, **options):
    """Return the output of Python in another process, which has to succeed: see `ran`."""
    process = ran(*arguments, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def run_command(*command, timeout_s=500, **options):
    """Return an ended process of any program with its output, whatever its exit status."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=timeout_s, **options
    )


def die_once(path):
    """Kill this process, unless the file shows that another one is killed: one of several."""
    with suppress(FileExistsError):
        Path(path).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


def persisted(client, x):
    """The array, once all its blocks are in memory: wherever the scheduler has put them."""
    from distributed import wait

    x = client.persist(x)
    wait(x)
    return x


def spread(client, x, workers=None):
    """The array, once each block is in memory of the worker that the sum of its indices numbers.

    Left to itself, the scheduler gives few blocks, or none, to a worker that a busy machine slows.
    ``workers`` are all of them by default. Neighbours along each axis are on different workers.
    """
    from distributed import wait

    workers, graph = workers or sorted(workers_of(client)), dict(x.__dask_graph__())
    keys_of, futures = defaultdict(list), {}
    for key in flatten(x.__dask_keys__()):
        keys_of[workers[sum(key[1:]) % len(workers)]].append(key)
    for worker, keys in keys_of.items():
        spread_futures = client.get(graph, keys, workers=[worker], sync=False)
        futures |= zip(keys, spread_futures, strict=True)
    wait([*futures.values()])
    client.run_on_scheduler(_loosen, {*graph})
    rebuild, arguments = x.__dask_postpersist__()
    return rebuild(futures, *arguments)


def _loosen(keys, dask_scheduler):
    """Let any worker make blocks again that are lost with theirs."""
    for key in keys & dask_scheduler.tasks.keys():
        dask_scheduler.tasks[key].loose_restrictions = True


def restart(client, workers=None):
    """Restart workers, by default all, and wait until others run in their places.

    Dask's own functions may return before the scheduler has seen the old ones leave.
    """
    from tests.transports.loopback import wait_until

    before = client.run_on_scheduler(_ids)
    if workers is None:
        workers = [*before]
        client.restart(timeout=BOUND_S)
    else:
        client.restart_workers(workers, timeout=BOUND_S)
    old = {before[worker] for worker in workers}
    wait_until(lambda: client.run_on_scheduler(_are_replaced, old, len(before)))


def _ids(dask_scheduler):
    """Ids of workers by address: another worker may have an old address."""
    return {address: worker.server_id for address, worker in dask_scheduler.workers.items()}


def _are_replaced(old, number, dask_scheduler):
    is_left = old & {*_ids(dask_scheduler).values()}
    return not is_left and len(dask_scheduler.running) == number


def layers_of(x):
    """The layers of an array's graph by name; for a library without layers its tasks by name.

    That library gives layers other names, by aliases.
    """
    graph = x.__dask_graph__()
    if hasattr(graph, "layers"):
        graph.validate()
        return graph.layers
    layers = {}
    for key, task in graph.items():
        layers.setdefault(key[0] if isinstance(key, tuple) else key, {})[key] = task
    for name, tasks in reversed([*layers.items()]):
        if all(isinstance(task, Alias) for task in tasks.values()):
            for target in {task.target[0] for task in tasks.values()}:
                layers[name] = layers.pop(target)
    return layers


def result_of(client, future, timeout_s=BOUND_S):
    """Return a future's result; if it does not come, fail with the states of all tasks."""
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError:
        # The scheduler alone is asked: a worker may be the one that does not answer.
        raise AssertionError(
            f"{future} after {timeout_s} s: {client.run_on_scheduler(_unfinished)}"
        ) from None


def _unfinished(dask_scheduler):
    tasks = dask_scheduler.tasks.values()
    return [
        (str(ts), str(ts.processing_on)) for ts in tasks if ts.state in ("waiting", "processing")
    ]


def given_up(client):
    """Return the routes that workers do not use, and why; for messages of assertions."""

    workers = sorted(workers_of(client))

    async def find_obstacles(dask_worker):
        context = dask_worker.plugins[PLUGIN_NAME].context
        obstacle = context.router.transports["cma"].holder_obstacle
        peers = [worker for worker in workers if worker != dask_worker.address]
        whys = {peer: await context.offload(obstacle, peer) for peer in peers}
        return dict(context.router.failures), {peer: why for peer, why in whys.items() if why}

    return client.run(find_obstacles)


def has_plugin(dask_worker):
    return PLUGIN_NAME in dask_worker.plugins


def run_of(client, y):
    """The last run that made a persisted output; None if there is none."""
    names = {y.name}
    if hasattr(y, "expr"):  # whose tasks have the names of the optimised array
        names.add(y.expr.optimize()._name)
    runs = runs_of(r for r in client.sync(fetch_records, client) if r.name in names)
    return runs[0] if runs else None


def used(client, y):
    """Return the names of the transports that moved the regions of a persisted output."""
    run = run_of(client, y)
    return {transport for _, _, transport in run.pairs} if run else set()


@asynccontextmanager
async def in_process(n_workers=2, **options):
    """A cluster in this process, with an asynchronous client."""
    from distributed import Client, LocalCluster

    chosen = {"threads_per_worker": 1, "processes": False, "dashboard_address": ":0", **options}
    async with (
        LocalCluster(n_workers=n_workers, asynchronous=True, **chosen) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        yield cluster, client


@contextmanager
def own_client(n_workers=2, **options):
    """A client of a new cluster: by default of two processes with one thread each."""
    from distributed import Client, LocalCluster

    chosen = {"threads_per_worker": 1, "dashboard_address": ":0", **options}
    with LocalCluster(n_workers=n_workers, **chosen) as cluster, Client(cluster) as client:
        yield client


@contextmanager
def worker_process(address, *args, cwd=None, **variables):
    """A worker as a user starts it, in a folder, and with variables in its environment."""
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-dashboard"]
    process = subprocess.Popen(
        [*command, "--nthreads", "1", "--no-nanny", *args],
        env={**os.environ, "PYTHONPATH": import_path(), **variables},
        cwd=cwd,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(BOUND_S)


def tls_client():
    """A client of two worker processes that use TLS."""
    from distributed import Security

    return own_client(security=Security.temporary(), protocol="tls://")


def mostly_slow(cases, quick):
    """Return all cases for a parameter of a test; those that are not quick are marked slow."""
    import pytest  # which workers do not need

    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def pairwise(*lists):
    """Return a few cases that have each pair of values of different lists."""
    every = [*itertools.product(*map(enumerate, lists))]
    pairs_of = [
        {(a, case[a][0], b, case[b][0]) for a, b in itertools.combinations(range(len(lists)), 2)}
        for case in every
    ]
    pending, cases = set().union(*pairs_of), []
    while pending:
        best = max(range(len(every)), key=lambda number: len(pending & pairs_of[number]))
        pending -= pairs_of[best]
        cases.append(tuple(value for _, value in every[best]))
    return cases


def assert_same_bits(result, expected):
    """Check that an array has the bits of another one, its dtype and its shape."""
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert result.tobytes() == expected.tobytes()


def indexed(shape, dtype=np.int64):
    """An array whose elements are their positions."""
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def bits(positions, dtype):
    """An array of any dtype. The bits of each element follow from one of these numbers."""
    dtype = np.dtype(dtype)
    if dtype.kind == "U":  # not all bits are characters
        return (positions % 1000).astype(dtype)
    number = np.asarray(positions)[..., None] * 31 + np.arange(dtype.itemsize) * 7
    raw = (number % (2 if dtype.kind == "b" else 251)).astype("u1")
    for field, start in (dtype.fields or {}).values():
        if field.kind == "b":
            raw[..., start] %= 2
    return np.ascontiguousarray(raw).view(dtype)[..., 0]
