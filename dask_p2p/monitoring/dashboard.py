"""The pages of Dask's dashboard, drawn with bokeh. Only `pages` imports this."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bokeh.models import Div
from bokeh.server.tornado import BokehTornado
from distributed.dashboard.components.scheduler import env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from tornado.ioloop import IOLoop

from dask_p2p.monitoring.drawing import THEMES, LinksPlot, RunsTable, StagesPlot, arranged
from dask_p2p.monitoring.feed import Feed
from dask_p2p.monitoring.picture import Picture

__all__ = ["connect"]

_PAGE = "p2p"
_PLOTS = {
    "individual-p2p-links": ("P2P Links", LinksPlot),
    "individual-p2p-stages": ("P2P Stages", StagesPlot),
    "individual-p2p-runs": ("P2P Runs", RunsTable),
}

_HEAD = """
<style>
  html { color-scheme: {{ theme.name }}; }
  html, body { background: {{ theme.paper }}; color: {{ theme.ink }}; }
  .navbar ul, .dropdown-content { background-color: {{ theme.bar }}; }
  .navbar li a { color: {{ theme.ink }}; }
  #p2p { height: calc(100% - 1.2rem); }
  #p2p-theme { text-align: right; font-size: 0.8rem; height: 1.2rem; }
  #p2p-theme a { color: {{ theme.ink }}; }
</style>
<script>
  const asked = new URLSearchParams(location.search);
  if (!asked.has("theme") && matchMedia("(prefers-color-scheme: dark)").matches) {
    asked.set("theme", "dark");
    location.replace("?" + asked);
  }
</script>
"""
_PAGE_TEMPLATE = env.from_string(
    '{% extends "base.html" %}{% block extra_resources %}' + _HEAD + "{% endblock %}"
    '{% block content %}<div id="p2p-theme"><a href="?theme={{ theme.other }}">'
    '{{ theme.other }}</a></div><div id="p2p">{{ plot_div }}</div>{{ plot_script }}{% endblock %}'
)
_PLOT_TEMPLATE = "{% block postamble %}" + _HEAD + "{% endblock %}"


def connect(scheduler: Any, feed: Callable[[], Feed | None]) -> bool:
    """Put the pages on a scheduler's dashboard, unless they are there; return whether they are."""
    applications = scheduler.http_application.applications
    dashboards = [app for app in applications if isinstance(app, BokehTornado)]
    if not dashboards:
        return False
    if any(f"/{_PAGE}" in app.app_paths for app in dashboards):
        return True
    parts = {_PAGE: [LinksPlot, StagesPlot, RunsTable]}
    parts |= {url: [part] for url, (_, part) in _PLOTS.items()}
    documents = {f"/{url}": partial(_fill, feed, those) for url, those in parts.items()}
    shared = template_variables(scheduler)  # the same dict for all of Dask's pages
    (dashboard, *_) = dashboards
    own = BokehApplication(documents, scheduler, dashboard.prefix, template_variables=shared)
    scheduler.http_application.add_application(own)
    own.initialize(IOLoop.current())
    own.start()
    dashboard._applications |= own._applications  # which /individual-plots.json lists
    shared["pages"].append(_PAGE)
    shared["plots"] += [{"url": url, "name": name} for url, (name, _) in _PLOTS.items()]
    shared["plots"].sort(key=lambda plot: plot["name"])
    return True


def _fill(
    feed: Callable[[], Feed | None], parts: list[Any], scheduler: Any, extra: Any, doc: Any
) -> None:
    """Fill a document: one that was asked for."""
    asked = doc.session_context.request.arguments.get("theme", [b""])[0]
    theme = THEMES.get(asked.decode("utf-8", "replace"), THEMES["light"])
    whole = len(parts) > 1
    doc.title = "Dask: P2P"
    doc.theme = theme.bokeh
    doc.template = _PAGE_TEMPLATE if whole else _PLOT_TEMPLATE
    doc.template_variables.update(extra, theme=theme)
    source = feed()
    if source is None:
        doc.add_root(Div(text="dask_p2p is not registered on this scheduler any more."))
        return
    drawn = [part(theme) for part in parts]
    doc.add_root(arranged(*(part.root for part in drawn)) if whole else drawn[0].root)
    page = _OpenPage(doc, drawn)
    page.draw(source.picture())
    source.watch(page)
    doc.on_session_destroyed(lambda context: source.unwatch(page))


class _OpenPage:
    """A document in a browser."""

    def __init__(self, doc: Any, parts: list[Any]) -> None:
        self._doc, self._parts = doc, parts
        self._drawn: Picture | None = None
        self._next: Picture | None = None  # that waits to be drawn

    @property
    def is_open(self) -> bool:
        session = self._doc.session_context.session
        return session is not None and session.connection_count > 0

    def show(self, picture: Picture) -> None:
        """Have it drawn soon: the newest one, where a slow browser has not taken another."""
        if picture is self._drawn:
            return
        if self._next is None:
            self._doc.add_next_tick_callback(self._draw_next)
        self._next = picture

    def _draw_next(self) -> None:
        picture, self._next = self._next, None
        if picture is not None:
            self.draw(picture)

    def draw(self, picture: Picture) -> None:
        self._drawn = picture
        for part in self._parts:
            part.draw(picture)
