"""How the scheduler's plugin for gangs gets there before the first graph with one."""

from __future__ import annotations

import logging
import sys
from typing import Any

from dask_p2p.engine.task import current_worker
from dask_p2p.plugins.registration import current_client

logger = logging.getLogger(__name__)


def register_sections_if_possible() -> None:
    """Put the plugin on the scheduler of the current client, or of a task's worker.

    Members do that too. But of a gang whose resources no worker has, none ever runs.
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
    """Put the plugin in place, unless it is there."""
    from distributed.protocol.pickle import dumps

    from dask_p2p.sections.scheduler import SectionsSchedulerPlugin

    plugin = SectionsSchedulerPlugin()
    await scheduler.register_scheduler_plugin(
        plugin=dumps(plugin), name=plugin.name, idempotent=True
    )


async def _give_later(scheduler: Any) -> None:
    """Put it in place for an asynchronous client, which may be closed before."""
    try:
        await give_plugin(scheduler)
    except Exception as exc:  # the first member tries again
        logger.info("the scheduler did not take the plugin for sections: %s", exc)
