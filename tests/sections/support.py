"""What is left of gangs on a cluster."""

from __future__ import annotations

import gc
import sys
import time

from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import TransferError
from dask_p2p.sections.gang.worker import WorkerRanks
from dask_p2p.sections.wire import endpoint

BOUND_S = 120.0


def coordinator_of(gangs):
    """Who decides for the scheduler's plugin which gangs run."""
    return gangs._coordinator


def gangs_on(dask_scheduler):
    """The part of the scheduler's plugin that runs gangs, if the plugin is there."""
    plugin = dask_scheduler.plugins.get(PLUGIN_NAME)
    return plugin and plugin._gangs


def ranks_of(dask_worker):
    """The ranks on a worker, if there were any."""
    plugin = dask_worker.plugins.get(PLUGIN_NAME)
    return plugin and plugin._parts.get(WorkerRanks)


def _of_scheduler(dask_scheduler):
    there = gangs_on(dask_scheduler)
    gangs = list(coordinator_of(there)._gangs) if there else []
    return gangs + [str(key) for key in dask_scheduler.tasks if "p2p-spmd" in str(key)]


def _of_worker(dask_worker):
    there = ranks_of(dask_worker)
    ranks = [rank_attempt.rank for rank_attempt in there._ranks.values()] if there else []
    ranks += there.saved.gangs if there else []
    return ranks + ["run_rank"] * members_that_run()


def members_that_run():
    """How many threads of this process are in a rank's function."""
    return sum(map(_is_of_rank, sys._current_frames().values()))


def _is_of_rank(frame):
    while frame is not None and frame.f_code.co_name != "run_rank":
        frame = frame.f_back
    return frame is not None


async def endpoints_of_ucx(dask_worker):
    """To how many others a worker has ways by UCX."""
    context = dask_worker.plugins[PLUGIN_NAME].context
    try:
        messenger = await context.offload(context.router.transports["ucx"].messenger)
    except TransferError:
        return 0
    return len(messenger.endpoints)


def be_on_hosts(next_name):
    """Have ranks of this process think that they are on the host that is named then."""
    endpoint._kernel_and_network = next_name


def nothing_is_left(client):
    """Wait until nothing of any gang is left: no task, no state, no thread."""
    deadline_s = time.monotonic() + BOUND_S
    while True:
        gc.collect()  # a client keeps futures whose error was raised: a cycle with its traceback
        scheduler = client.run_on_scheduler(_of_scheduler)
        workers = client.run(_of_worker, on_error="return")  # one that just leaves need not answer
        left = [of for of in workers.values() if not isinstance(of, OSError)]
        if not scheduler and not any(left):
            return
        assert time.monotonic() < deadline_s, (scheduler, workers)
        time.sleep(0.05)
