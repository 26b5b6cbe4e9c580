"""The pages on Dask's dashboard. Only the package's `add_pages` imports this: it needs bokeh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bokeh import models
from bokeh.layouts import column, row
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.server.tornado import BokehTornado
from bokeh.transform import factor_cmap, linear_cmap
from distributed.dashboard.components.scheduler import env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from tornado.ioloop import IOLoop

from dask_p2p.errors import REPOSITORY
from dask_p2p.monitoring.charts import PARTS, Columns
from dask_p2p.monitoring.feed import TABLE, Feed, Picture, has_figures, picture

# The plots and the table are bokeh models. The colours suit light and dark pages. All other
# styles come from bokeh's theme and the page.

_PALETTE = Viridis256[48:]  # without the darkest colours, invisible on a dark page
_FAINT = "#80808040"
_FELL_BACK = "#e8553d"
_PARTS = (_FAINT, "#e69f00", "#3d8fd1", "#1fa37a")  # distinct also for colour-blind readers
_MOST_LABELLED = 16  # most workers for labels of cells, and for outlines of bars
_LINK_TIPS = {
    "Reader": "@reader",
    "Holder": "@holder",
    "Speed": "@gbs{0.00} GB/s by @transport, @share{0%} of its fastest link",
    "Bytes by transport": "@text",
    "Time that tasks waited": "@waited_s{0.000} s",
    "Tasks": "@tasks",
    "Transports that failed": "@fallback",
}
_STAGE_TIPS = {
    "Activity": "@part",
    "Task": "@name, block @block",
    "Worker": "@worker",
    "Read from": "@holder by @transport",
    "Bytes": "@nbytes{0.00 ib}",
    "Time": "@seconds{0.0000} s",
    "Failure": "@error",
}
_PROGRESS = """
<progress value="<%= value %>" style="width: 50%; accent-color:
<%= {failed: '#e8553d', cancelled: '#808080'}[state] || '#3d8fd1' %>"></progress>
<%= state == 'running' ? Math.floor(100 * value) + '%' : state %>
"""
_TABLE_CSS = """
.slick-header-column, .slick-row, .slick-row.odd, .slick-cell {
  background: none !important; color: inherit !important; border-color: #80808040 !important;
}
"""
_NARROW_CSS = "@media (max-width: 900px) { :host { flex-direction: column !important; } }"
_TABS_CSS = ".bk-tab { color: inherit; } .bk-tab.bk-active { color: #3d8fd1; background: none; }"
# Pixels in the table of runs.
_CHARACTER, _PADDING, _PROGRESS_WIDTH, _MOST_WIDTH = 6, 14, 100, 220
_MOST_MEASURED = 20  # rows


def _figure(name: str, tips: dict[str, str], **style: Any) -> Any:
    style = {"title": " ", "y_range": models.FactorRange(), "sizing_mode": "stretch_both"} | style
    clear = {"background_fill_color": None, "border_fill_color": None}
    root = figure(name=name, tooltips=[*tips.items()], **clear, **style)
    root.yaxis.major_label_policy = models.NoOverlap()
    root.ygrid.visible = False
    return root


class LinksPlot:
    """A matrix of readers and holders."""

    def __init__(self) -> None:
        self._source = models.ColumnDataSource(name="p2p-links")
        axes = {
            "x_axis_label": "Holder: worker that has the blocks",
            "y_axis_label": "Reader: worker that reads them",
            "x_range": models.FactorRange(),
        }
        frame = {"tools": "", "toolbar_location": None}
        self.root = _figure("p2p-links-plot", _LINK_TIPS, **axes, **frame)
        center = {"x": "holder", "y": "reader", "source": self._source}
        colour = linear_cmap("share", _PALETTE, low=0, high=1, nan_color=_FAINT)
        size = {"width": 0.92, "height": 0.92, "line_width": 2}
        cells = self.root.rect(**center, **size, color=colour, line_color="outline")
        ink = linear_cmap("share", ["#ffffff", "#000000"], low=0, high=0.9)
        middle = {"text_align": "center", "text_baseline": "middle", "text_font_size": "12px"}
        self._labels = self.root.text(**center, text="label", text_color=ink, **middle)
        bar = cells.construct_color_bar(
            title="Speed in GB/s; colour: relative to the fastest link of the same transport",
            formatter=models.NumeralTickFormatter(format="0%"),
        )
        bar.update(background_fill_color=None, height=8, padding=4)
        self.root.add_layout(bar, "above")
        self.root.xaxis.update(major_label_orientation=0.6, major_label_policy=models.NoOverlap())
        self.root.xgrid.visible = False

    def draw(self, picture: Picture) -> None:
        chart = picture.links
        self.root.title.text = chart.title
        self.root.x_range.factors = chart.workers
        self.root.y_range.factors = chart.workers[::-1]
        self._labels.visible = len(chart.workers) <= _MOST_LABELLED
        looks: Columns = {
            "label": ["" if gbs != gbs else f"{gbs:.3g}" for gbs in chart.columns["gbs"]],
            "outline": [_FELL_BACK if why else None for why in chart.columns["fallback"]],
        }
        self._source.data = chart.columns | looks


class StagesPlot:
    """Bars over time, with a row for each worker."""

    def __init__(self) -> None:
        self._source = models.ColumnDataSource(name="p2p-stages")
        axis = {"x_axis_label": "Seconds since the first task", "x_range": models.Range1d(0, 1)}
        tools = {"tools": "xpan,xwheel_zoom,xbox_zoom,reset", "active_scroll": "xwheel_zoom"}
        self.root = _figure("p2p-stages-plot", _STAGE_TIPS, **axis, **tools)
        fill = {"fill_color": factor_cmap("part", _PARTS, PARTS), "line_color": "#ffffff"}
        self._bars = self.root.quad(
            source=self._source, legend_field="part", line_width=0.5, **fill
        )
        self.root.toolbar.logo = None
        legend = self.root.legend[0]
        legend.update(orientation="horizontal", padding=2, margin=0)
        legend.update(background_fill_color=None, border_line_color=None)
        self.root.add_layout(legend, "above")

    def draw(self, picture: Picture) -> None:
        chart = picture.stages
        self.root.title.text = chart.title
        self.root.y_range.factors = chart.workers[::-1]
        self._bars.glyph.line_alpha = 1.0 if len(chart.workers) <= _MOST_LABELLED else 0.0
        if self._source.data != chart.columns:  # unchanged data keep the user's zoom
            self.root.x_range.update(start=0, end=max(chart.columns["right"], default=1))
            self._source.data = chart.columns


class StepsPlot:
    """The speed of a section over time."""

    def __init__(self) -> None:
        self._source = models.ColumnDataSource(name="p2p-steps")
        tips = {"Steps per second": "@rate{0.000}", "Step": "@step", "Seconds": "@seconds{0.0}"}
        axes = {"x_axis_label": "Seconds since the start", "y_axis_label": "Steps per second"}
        frame = {"tools": "", "toolbar_location": None}
        frame |= {name: models.Range1d(0, 1) for name in ("x_range", "y_range")}
        self.root = _figure("p2p-steps-plot", tips, **axes, **frame)
        points = {"x": "seconds", "y": "rate", "source": self._source, "color": _PARTS[2]}
        self.root.line(**points, line_width=2)
        self.root.scatter(**points, size=4)

    def draw(self, picture: Picture) -> None:
        chart = picture.steps
        self.root.title.text = chart.title
        self.root.x_range.end = max(chart.columns["seconds"], default=1)
        self.root.y_range.end = 1.05 * max(chart.columns["rate"], default=1) or 1
        self._source.data = chart.columns


class WaitingPlot:
    """A bar for each rank of a section: the time that it waited for others."""

    def __init__(self) -> None:
        self._source = models.ColumnDataSource(name="p2p-waiting")
        tips = {"Rank": "@rank", "Worker": "@worker", "Waited": "@text", "Step": "@step"}
        axes = {"x_axis_label": "Share of its time that the rank waited", "y_axis_label": "Rank"}
        frame = {"tools": "", "toolbar_location": None, "x_range": (0, 1)}
        self.root = _figure("p2p-waiting-plot", tips, **axes, **frame)
        self.root.xaxis.formatter = models.NumeralTickFormatter(format="0%")
        of_rank = {"y": "rank", "source": self._source}
        self.root.hbar(**of_rank, right="share", height=0.8, color=_PARTS[1])
        label = {"x": "at", "text": "text", "text_baseline": "middle", "text_font_size": "12px"}
        self._labels = self.root.text(**of_rank, **label, text_color="ink")

    def draw(self, picture: Picture) -> None:
        chart = picture.waiting
        self.root.title.text = chart.title
        self.root.y_range.factors = chart.workers[::-1]
        self._labels.visible = len(chart.workers) <= _MOST_LABELLED
        shares = chart.columns["share"]
        looks: Columns = {  # labels are right of short bars, and inside long ones
            "at": [0.01 + (share if share < 0.6 else 0) for share in shares],
            "ink": ["#808080" if share < 0.6 else "#000000" for share in shares],
        }
        self._source.data = chart.columns | looks


class RunsTable:
    """The runs, newest first. Columns that apply to none of them are not shown."""

    def __init__(self) -> None:
        self._source = models.ColumnDataSource(name="p2p-runs")
        escaped = models.HTMLTemplateFormatter(template="<%- value %>")
        formatters = {"progress": models.HTMLTemplateFormatter(template=_PROGRESS)}
        self._columns = [
            models.TableColumn(
                field=name,
                title=f'<span title="{meaning}">{name}</span>',
                width=0,
                formatter=formatters.get(name, escaped),
            )
            for name, meaning in TABLE.items()
        ]
        unchanged = dict.fromkeys(("sortable", "reorderable", "selectable"), False)
        self.root = models.DataTable(source=self._source, columns=self._columns)
        self.root.update(name="p2p-runs-table", stylesheets=[_TABLE_CSS], **unchanged)
        self.root.update(index_position=None, sizing_mode="stretch_both", autosize_mode="none")

    def draw(self, picture: Picture) -> None:
        for table_column in self._columns:
            width, is_shown = _width(table_column, picture.runs[table_column.field])
            # Each change draws the whole table again, so no column becomes narrower.
            if is_shown and (width > table_column.width or not table_column.visible):
                table_column.width = width
            if table_column.visible != is_shown:
                table_column.visible = is_shown
        self._source.data = picture.runs


def _width(column: Any, values: Sequence[Any]) -> tuple[int, bool]:
    if column.field == "progress":
        return _PROGRESS_WIDTH, True
    texts = [str(value) for value in values[:_MOST_MEASURED]]
    width = _PADDING + _CHARACTER * max(map(len, [column.field, *texts]))
    return min(width, _MOST_WIDTH), not texts or has_figures(texts)


class Page:
    """The page with all plots: those of a section's steps are in a tab of their own."""

    def __init__(self) -> None:
        kinds: Any = LinksPlot, StagesPlot, RunsTable, WaitingPlot, StepsPlot
        self._parts = links, stages, runs, waiting, steps = [kind() for kind in kinds]
        self._section = ""  # name of the newest run, if it was a section with steps
        style = {"sizing_mode": "stretch_both", "stylesheets": [_NARROW_CSS]}
        tabs = [
            models.TabPanel(title=title, child=row(*(plot.root for plot in plots), **style))
            for title, plots in {
                "Links and stages": (links, stages),
                "Steps": (waiting, steps),
            }.items()
        ]
        self._tabs = models.Tabs(tabs=tabs, name="p2p-tabs", stylesheets=[_TABS_CSS])
        self._tabs.update(sizing_mode="stretch_both", min_height=380)
        runs.root.update(height=220, sizing_mode="stretch_width")
        self.root = column(self._tabs, runs.root, sizing_mode="stretch_both")

    def draw(self, picture: Picture) -> None:
        """Show a picture, and the other tab if a run of the other kind is the newest one now."""
        for part in self._parts:
            part.draw(picture)
        if picture.section != self._section:
            self._section = picture.section
            self._tabs.active = int(bool(picture.section))


_GUIDE = f"{REPOSITORY}/blob/main/docs/how-to/dashboard.md"
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
  @media (max-width: 900px) { #p2p { height: 1100px; } }
  #p2p-theme { text-align: right; font-size: 0.8rem; height: 1.2rem; }
  #p2p-theme a { color: inherit; margin-left: 1em; }
</style>
<script>
  if (!location.search.includes("theme=") && matchMedia("(prefers-color-scheme: dark)").matches)
    location.replace("?theme=dark");
</script>
"""
_PAGE_TEMPLATE = env.from_string(
    '{% extends "base.html" %}{% block extra_resources %}' + _HEAD + "{% endblock %}"
    '{% block content %}<div id="p2p-theme">'
    '<a href="?theme={{ other_theme }}">{{ other_theme }}</a>'
    f'<a href="{_GUIDE}" title="Guide to this page" target="_blank">?</a></div>'
    '<div id="p2p">{{ plot_div }}</div>{{ plot_script }}{% endblock %}'
)
_PLOT_TEMPLATE = "{% block postamble %}" + _HEAD + "{% endblock %}"


def connect(scheduler: Any, feed: Callable[[], Feed | None]) -> None:
    """Add the pages to a scheduler's dashboard, once."""
    applications = scheduler.http_application.applications
    dashboards = [app for app in applications if isinstance(app, BokehTornado)]
    if not dashboards or any(f"/{_PAGE}" in app.app_paths for app in dashboards):
        return
    documents = {f"/{_PLOT}{name}": partial(_fill, feed, plot) for name, plot in _PLOTS.items()}
    documents[f"/{_PAGE}"] = partial(_fill, feed, Page)
    shared = template_variables(scheduler)  # the same dict for all of Dask's pages
    (dashboard, *_) = dashboards
    application = BokehApplication(
        documents, scheduler, dashboard.prefix, template_variables=shared
    )
    scheduler.http_application.add_application(application)
    application.initialize(IOLoop.current())
    application.start()
    dashboard._applications |= application._applications  # for the list in /individual-plots.json
    shared["pages"].append(_PAGE)
    shared["plots"] += [{"url": _PLOT + name, "name": f"P2P {name.title()}"} for name in _PLOTS]
    shared["plots"].sort(key=lambda plot: plot["name"])


def _fill(feed: Callable[[], Feed | None], kind: Any, scheduler: Any, extra: Any, doc: Any) -> None:
    """Fill a requested document with one of the plots, or with all of them."""
    themes = doc.session_context.request.arguments.get("theme")
    theme, other_theme = ("dark", "light") if themes == [b"dark"] else ("light", "dark")
    doc.title = "Dask: P2P"
    doc.theme = "dark_minimal" if theme == "dark" else None
    doc.template = _PAGE_TEMPLATE if kind is Page else _PLOT_TEMPLATE
    doc.template_variables.update(extra, theme=theme, other_theme=other_theme)
    plot = kind()
    source = feed()
    shown = source.picture() if source is not None else picture([])
    plot.draw(shown)

    def redraw() -> None:
        """Draw new data while a browser is connected and the plugin is registered."""
        nonlocal shown
        session, source = doc.session_context.session, feed()
        if source is not None and session is not None and session.connection_count:
            before, shown = shown, source.refresh()
            if shown is not before:
                plot.draw(shown)

    doc.add_root(plot.root)
    doc.add_periodic_callback(redraw, _LOOK_MS)
