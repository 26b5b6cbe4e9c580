"""The plots and the table, as bokeh models. Only `dashboard` imports this module.

The colours suit light and dark pages. All other styles come from bokeh's theme and the page.
"""

from __future__ import annotations

from typing import Any

from bokeh import models
from bokeh.layouts import column, row
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.transform import factor_cmap, linear_cmap

from dask_p2p.monitoring.page.charts import PARTS, Columns
from dask_p2p.monitoring.page.feed import TABLE, Picture

_PALETTE = Viridis256[48:]  # without the darkest colours, invisible on a dark page
_FAINT = "#80808040"
_FELL_BACK = "#e8553d"
_PARTS = (_FAINT, "#e69f00", "#3d8fd1", "#1fa37a")  # distinct also for colour-blind readers
_MOST_LABELLED = 16  # most workers for labels of cells, and for outlines of bars
_LINK_TIPS = {
    "reader": "@reader",
    "holder": "@holder",
    "GB/s": "@gbs{0.00} by @transport, @share{0%} of the best",
    "bytes": "@text",
    "waited": "@waited_s{0.000} s",
    "tasks": "@tasks",
    "fell back": "@fallback",
}
_STAGE_TIPS = {
    "": "@part",
    "of": "@name, block @block",
    "on": "@worker",
    "from": "@holder by @transport",
    "bytes": "@nbytes{0.00 ib}",
    "seconds": "@seconds{0.0000}",
    "failed": "@error",
}
_PROGRESS = """
<progress value="<%= value %>" style="width: 50%; accent-color:
<%= state == 'failed' ? '#e8553d' : '#3d8fd1' %>"></progress>
<%= state == 'running' ? Math.floor(100 * value) + ' %' : state %>
"""
_TABLE_CSS = """
.slick-header-column, .slick-row, .slick-row.odd, .slick-cell {
  background: none !important; color: inherit !important; border-color: #80808040 !important;
}
"""
_TITLES = {"exchange": "longest task"}
_WIDTHS = {"operation": 110, "shape": 130, "blocks": 90, "progress": 100, "transports": 110}
_WIDTHS["steps"] = 170


def _figure(name: str, tips: dict[str, str], **more: Any) -> Any:
    """Return a bokeh figure with a row for each worker."""
    more |= {"title": " ", "y_range": models.FactorRange(), "sizing_mode": "stretch_both"}
    clear = {"background_fill_color": None, "border_fill_color": None}
    root = figure(name=name, tooltips=[*tips.items()], **clear, **more)
    root.yaxis.major_label_policy = models.NoOverlap()
    root.ygrid.visible = False
    return root


class LinksPlot:
    """A matrix of readers and holders."""

    def __init__(self) -> None:
        self._source = models.ColumnDataSource(name="p2p-links")
        axes = {"x_axis_label": "holder", "y_axis_label": "reader", "x_range": models.FactorRange()}
        look = {"tools": "", "toolbar_location": None, "min_width": 380}
        self.root = _figure("p2p-links-plot", _LINK_TIPS, **axes, **look)
        center = {"x": "holder", "y": "reader", "source": self._source}
        colour = linear_cmap("share", _PALETTE, low=0, high=1, nan_color=_FAINT)
        size = {"width": 0.92, "height": 0.92, "line_width": 2}
        cells = self.root.rect(**center, **size, color=colour, line_color="outline")
        ink = linear_cmap("share", ["#ffffff", "#000000"], low=0, high=0.9)
        middle = {"text_align": "center", "text_baseline": "middle", "text_font_size": "12px"}
        self._labels = self.root.text(**center, text="label", text_color=ink, **middle)
        bar = cells.construct_color_bar(
            title="of the best link of the same transport (in cells: GB/s)",
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
        axis = {"x_axis_label": "seconds", "x_range": models.Range1d(0, 1), "min_width": 480}
        tools = {"tools": "xpan,xwheel_zoom,xbox_zoom,reset", "active_scroll": "xwheel_zoom"}
        self.root = _figure("p2p-stages-plot", _STAGE_TIPS, **axis, **tools)
        look = {"fill_color": factor_cmap("part", _PARTS, PARTS), "line_color": "#ffffff"}
        self._bars = self.root.quad(
            source=self._source, legend_field="part", line_width=0.5, **look
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


class RunsTable:
    """The runs, newest first."""

    def __init__(self) -> None:
        self._source = models.ColumnDataSource(name="p2p-runs")
        escaped = models.HTMLTemplateFormatter(template="<%- value %>")
        formatters = {"progress": models.HTMLTemplateFormatter(template=_PROGRESS)}
        columns = [
            models.TableColumn(
                field=name,
                title=_TITLES.get(name, name),
                width=_WIDTHS.get(name, 70),
                formatter=formatters.get(name, escaped),
            )
            for name in TABLE
        ]
        unchanged = dict.fromkeys(("sortable", "reorderable", "selectable"), False)
        self.root = models.DataTable(source=self._source, columns=columns, index_position=None)
        self.root.update(name="p2p-runs-table", stylesheets=[_TABLE_CSS], **unchanged)
        self.root.sizing_mode = "stretch_both"

    def draw(self, picture: Picture) -> None:
        self._source.data = picture.runs


class Page:
    """The page with all plots."""

    def __init__(self) -> None:
        self._parts = links, stages, runs = LinksPlot(), StagesPlot(), RunsTable()
        upper = row(links.root, stages.root, sizing_mode="stretch_both", min_height=360)
        runs.root.update(height=220, sizing_mode="stretch_width")
        self.root = column(upper, runs.root, sizing_mode="stretch_both")

    def draw(self, picture: Picture) -> None:
        """Show a picture."""
        for part in self._parts:
            part.draw(picture)
