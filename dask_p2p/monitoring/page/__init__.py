"""The page /p2p of Dask's dashboard, and its plots each as a page.

`charts` has what is drawn, `feed` when it is asked for, `plots` bokeh's models. Dask has no public
way to add pages to a scheduler that runs: `dashboard` has what is used of its own.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from dask_p2p.monitoring.page.feed import Feed

logger = logging.getLogger("distributed.scheduler")  # Dask's own, which has the page's address


def add_pages(scheduler: Any, feed: Callable[[], Feed | None]) -> bool:
    """Put the pages on a scheduler's dashboard, once; return whether they are there.

    If not, the log says why, unless there is no dashboard. `feed` returns what to show, or None.
    """
    if importlib.util.find_spec("bokeh") is None:
        logger.info("dask_p2p: no page /p2p on the dashboard, which needs bokeh")
        return False
    try:
        if not scheduler.http_application.applications:  # what follows takes time to import
            return False
        from dask_p2p.monitoring.page.dashboard import connect

        return connect(scheduler, feed)
    except Exception as exc:  # nothing that moves data depends on it
        logger.warning("dask_p2p: no page /p2p on the dashboard: %s", exc, exc_info=True)
        return False
