"""Checks that gangs leave nothing on a cluster."""

from __future__ import annotations

import gc
import sys

from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import TransferError
from dask_p2p.sections.gang.scheduler import SectionsSchedulerPlugin
from dask_p2p.sections.gang.worker import SectionsPlugin
from dask_p2p.sections.wire import endpoint
from tests.transports.loopback import wait_until


def coordinator_of(plugin):
    """Return the coordinator of the scheduler's plugin."""
    return plugin._coordinator


def _of_scheduler(dask_scheduler):
    plugin = dask_scheduler.plugins.get(SectionsSchedulerPlugin.name)
    gangs = list(coordinator_of(plugin)._gangs) if plugin else []
    return gangs + [str(key) for key in dask_scheduler.tasks if "p2p-spmd" in str(key)]


def _of_worker(dask_worker):
    plugin = dask_worker.plugins.get(SectionsPlugin.name)
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


async def endpoints_of_ucx(dask_worker):
    """Return the number of workers that a worker has UCX endpoints to."""
    context = dask_worker.plugins[PLUGIN_NAME].context
    try:
        messenger = await context.offload(context.router.transports["ucx"].messenger)
    except TransferError:
        return 0
    return len(messenger.endpoints)


def be_on_hosts(next_name):
    """Give each later rank of this process the host that `next_name` returns."""
    endpoint._kernel_and_network = next_name


def nothing_is_left(client):
    """Wait until nothing of any gang is left: no task, no state, no thread."""
    left = []

    def is_empty():
        gc.collect()  # futures whose error was raised are in a cycle with its traceback
        of_workers = client.run(_of_worker, on_error="return")  # one that leaves need not answer
        answers = [of for of in of_workers.values() if not isinstance(of, OSError)]
        left[:] = client.run_on_scheduler(_of_scheduler), of_workers
        return not left[0] and not any(answers)

    wait_until(is_empty, state=lambda: left)
