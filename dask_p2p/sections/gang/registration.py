"""Installs the scheduler's plugin for gangs before the first graph with a gang."""

from __future__ import annotations

import logging
import sys
from typing import Any

from dask_p2p.engine.task import current_worker
from dask_p2p.plugins.registration import current_client

logger = logging.getLogger(__name__)


def register_sections_if_possible() -> None:
    """Install the plugin on the scheduler of the current client, or of a task's worker.

    Ranks install it as well. But no rank ever runs if no worker has the gang's resources.
    """
    if "distributed" not in sys.modules:
        return
    from distributed.utils import sync

    worker, _ = current_worker()
    if worker is not None:
        sync(worker.loop, give_plugin, worker.scheduler)
    elif (client := current_client()) is None:
        return
    elif client.asynchronous:
        client.loop.add_callback(_give_later, client.scheduler)
    else:
        client.sync(give_plugin, client.scheduler)


async def give_plugin(scheduler: Any) -> None:
    """Install the plugin, unless the scheduler has it."""
    from distributed.protocol.pickle import dumps

    from dask_p2p.sections.gang.scheduler import SectionsSchedulerPlugin

    plugin = SectionsSchedulerPlugin()
    await scheduler.register_scheduler_plugin(
        plugin=dumps(plugin), name=plugin.name, idempotent=True
    )


async def _give_later(scheduler: Any) -> None:
    """Install the plugin for an asynchronous client, which may be closed before."""
    try:
        await give_plugin(scheduler)
    except Exception as exc:  # the first rank tries again
        logger.info("the scheduler did not take the plugin for sections: %s", exc)
