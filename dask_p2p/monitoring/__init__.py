"""What workers did and do: records, runs, metrics, and the page /p2p of Dask's dashboard.

`charts` computes the data of the page, `feed` requests records from workers, and `dashboard` has
the bokeh models. Dask has no public interface to add pages to a running scheduler.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dask_p2p.errors import install_command

if TYPE_CHECKING:
    from dask_p2p.monitoring.feed import Feed

logger = logging.getLogger("distributed.scheduler")  # Dask's logger, which logs the page's address


def add_pages(scheduler: Any, feed: Callable[[], Feed | None]) -> None:
    """Add the pages to a scheduler's dashboard, once.

    Logs the reason if the pages cannot be added, except without a dashboard. `feed` returns the
    data source of the pages, or None.
    """
    if importlib.util.find_spec("bokeh") is None:
        command = install_command("dashboard")
        logger.info("dask_p2p: no page /p2p on the dashboard, which needs bokeh. Run: %s", command)
        with suppress(AttributeError):  # another server of HTTP than Dask's
            _add_advice(scheduler.http_application, command)
        return
    try:
        if scheduler.http_application.applications:  # before the slow import
            from dask_p2p.monitoring.dashboard import connect

            connect(scheduler, feed)
    except Exception as exc:  # data transfers do not depend on the pages
        logger.warning("dask_p2p: no page /p2p on the dashboard: %s", exc, exc_info=True)


def _add_advice(application: Any, command: str) -> None:
    """Add a page with the command that installs bokeh, in the place of the missing page."""
    from tornado.web import RequestHandler

    class Advice(RequestHandler):
        """The page /p2p of a dashboard without bokeh."""

        def get(self) -> None:
            self.write(f"The page /p2p needs bokeh. Run: <code>{command}</code>")

    application.add_handlers(".*$", [("/p2p", Advice)])
