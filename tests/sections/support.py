"""Checks that gangs leave nothing on a cluster."""

import gc
import sys

from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import TransferError
from dask_p2p.sections.gang.worker import WorkerRanks
from dask_p2p.sections.wire import endpoint
from tests.transports.loopback import wait_until


def coordinator_of(gangs):
    return gangs._coordinator


def gangs_on(dask_scheduler):
    """Return the part of the scheduler's plugin that runs gangs; None without the plugin."""
    plugin = dask_scheduler.plugins.get(PLUGIN_NAME)
    return plugin and plugin.gangs


def ranks_of(dask_worker):
    """Return the ranks on a worker; None if there were none."""
    plugin = dask_worker.plugins.get(PLUGIN_NAME)
    return plugin and plugin._parts.get(WorkerRanks)


def _of_scheduler(dask_scheduler):
    plugin = gangs_on(dask_scheduler)
    gangs = list(coordinator_of(plugin)._gangs) if plugin else []
    keys = map(str, dask_scheduler.tasks)
    return gangs + [key for key in keys if "p2p-spmd" in key or "p2p-fused" in key]


def _of_worker(dask_worker):
    plugin = ranks_of(dask_worker)
    ranks = [rank_attempt.rank for rank_attempt in plugin._ranks.values()] if plugin else []
    ranks += plugin.saved.gangs if plugin else []
    return ranks + ["run_rank"] * ranks_that_run()


def ranks_that_run():
    """Return the number of this process's threads that run a rank."""
    return sum(map(_is_of_rank, sys._current_frames().values()))


def _is_of_rank(frame):
    while frame is not None and frame.f_code.co_name != "run_rank":
        frame = frame.f_back
    return frame is not None


async def messenger_of(dask_worker):
    context = dask_worker.plugins[PLUGIN_NAME].context
    return await context.offload(context.router.transports["ucx"].messenger)


async def endpoints_of_ucx(dask_worker):
    """Return the number of workers that a worker has UCX endpoints to."""
    try:
        return len((await messenger_of(dask_worker)).endpoints)
    except TransferError:
        return 0


def be_on_hosts(next_name):
    """Give each later rank of this process the host that `next_name` returns."""
    endpoint._kernel_and_network = next_name


def nothing_is_left(client):
    """Wait until nothing of any gang is left: no task, no state, no thread."""
    leftovers = []

    def is_empty():
        gc.collect()  # futures whose error was raised are in a cycle with its traceback
        of_workers = client.run(_of_worker, on_error="return")  # one that leaves need not answer
        counts = [count for count in of_workers.values() if not isinstance(count, OSError)]
        leftovers[:] = client.run_on_scheduler(_of_scheduler), of_workers
        return not leftovers[0] and not any(counts)

    wait_until(is_empty, state=lambda: leftovers)
