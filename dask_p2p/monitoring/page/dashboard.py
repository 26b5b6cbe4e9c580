"""The pages on Dask's dashboard. Only the package's `add_pages` imports this: it needs bokeh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bokeh.server.tornado import BokehTornado
from distributed.dashboard.components.scheduler import env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from tornado.ioloop import IOLoop

from dask_p2p.monitoring.page.feed import Feed, picture
from dask_p2p.monitoring.page.plots import (
    LinksPlot,
    Page,
    RunsTable,
    StagesPlot,
    StepsPlot,
    WaitingPlot,
)

_PAGE, _PLOT = "p2p", "individual-p2p-"
_PLOTS = {
    "links": LinksPlot,
    "runs": RunsTable,
    "stages": StagesPlot,
    "steps": StepsPlot,
    "waiting": WaitingPlot,
}
_LOOK_MS = 250  # period of a page's updates: half of `feed.INTERVAL_S`

_HEAD = """
<style>
  html { color-scheme: {{ theme }}; }
  {% if theme == "dark" %}
  html, body { background: #15191c; color: #e0e0e0; }
  .navbar ul, .dropdown-content { background-color: #2b2e33; }
  .navbar li a { color: #e0e0e0; }
  {% endif %}
  #p2p { height: calc(100% - 1.2rem); }
  #p2p-theme { text-align: right; font-size: 0.8rem; height: 1.2rem; }
  #p2p-theme a { color: inherit; }
</style>
<script>
  if (!location.search.includes("theme=") && matchMedia("(prefers-color-scheme: dark)").matches)
    location.replace("?theme=dark");
</script>
"""
_PAGE_TEMPLATE = env.from_string(
    '{% extends "base.html" %}{% block extra_resources %}' + _HEAD + "{% endblock %}"
    '{% block content %}<div id="p2p-theme"><a href="?theme={{ other }}">{{ other }}</a></div>'
    '<div id="p2p">{{ plot_div }}</div>{{ plot_script }}{% endblock %}'
)
_PLOT_TEMPLATE = "{% block postamble %}" + _HEAD + "{% endblock %}"


def connect(scheduler: Any, feed: Callable[[], Feed | None]) -> bool:
    """Add the pages to a scheduler's dashboard, once. Return whether they are there."""
    applications = scheduler.http_application.applications
    dashboards = [app for app in applications if isinstance(app, BokehTornado)]
    if not dashboards:
        return False
    if any(f"/{_PAGE}" in app.app_paths for app in dashboards):
        return True
    documents = {f"/{_PLOT}{name}": partial(_fill, feed, plot) for name, plot in _PLOTS.items()}
    documents[f"/{_PAGE}"] = partial(_fill, feed, Page)
    shared = template_variables(scheduler)  # the same dict for all of Dask's pages
    (dashboard, *_) = dashboards
    own = BokehApplication(documents, scheduler, dashboard.prefix, template_variables=shared)
    scheduler.http_application.add_application(own)
    own.initialize(IOLoop.current())
    own.start()
    dashboard._applications |= own._applications  # for the list in /individual-plots.json
    shared["pages"].append(_PAGE)
    shared["plots"] += [{"url": _PLOT + name, "name": f"P2P {name.title()}"} for name in _PLOTS]
    shared["plots"].sort(key=lambda plot: plot["name"])
    return True


def _fill(feed: Callable[[], Feed | None], kind: Any, scheduler: Any, extra: Any, doc: Any) -> None:
    """Fill a requested document with one of the plots, or with all of them."""
    asked = doc.session_context.request.arguments.get("theme")
    theme, other = ("dark", "light") if asked == [b"dark"] else ("light", "dark")
    doc.title = "Dask: P2P"
    doc.theme = "dark_minimal" if theme == "dark" else None
    doc.template = _PAGE_TEMPLATE if kind is Page else _PLOT_TEMPLATE
    doc.template_variables.update(extra, theme=theme, other=other)
    plot = kind()
    source = feed()
    shown = source.picture() if source is not None else picture([])
    plot.draw(shown)

    def look() -> None:
        """Draw new data while a browser is connected and the plugin is registered."""
        nonlocal shown
        session, source = doc.session_context.session, feed()
        if source is not None and session is not None and session.connection_count:
            before, shown = shown, source.look()
            if shown is not before:
                plot.draw(shown)

    doc.add_root(plot.root)
    doc.add_periodic_callback(look, _LOOK_MS)
