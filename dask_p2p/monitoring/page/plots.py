"""The plots and the table, as bokeh's models. Only `dashboard` imports this.

What they have of colours suits light pages and dark ones; bokeh's theme and the page have the rest.
"""

from __future__ import annotations

from typing import Any

from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    DataTable,
    FactorRange,
    HTMLTemplateFormatter,
    NoOverlap,
    NumeralTickFormatter,
    Range1d,
    TableColumn,
)
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.transform import factor_cmap, linear_cmap

from dask_p2p.monitoring.page.charts import PARTS, Columns
from dask_p2p.monitoring.page.feed import TABLE, Picture

__all__ = ["LinksPlot", "Page", "RunsTable", "StagesPlot"]

_PALETTE = Viridis256[48:]  # what is darker than that is lost on a dark page
_FAINT = "#80808040"
_FELL_BACK = "#e8553d"
_PARTS = (_FAINT, "#e69f00", "#3d8fd1", "#1fa37a")  # told apart by all
_MOST_LABELLED = 16  # workers whose cells have room for a number, and whose bars for outlines


def _figure(name: str, **more: Any) -> Any:
    """Return a plot with a row for each worker."""
    root = figure(
        title=" ",
        name=name,
        y_range=FactorRange(),
        sizing_mode="stretch_both",
        background_fill_color=None,
        border_fill_color=None,
        **more,
    )
    root.yaxis.major_label_policy = NoOverlap()
    root.ygrid.visible = False
    return root


class LinksPlot:
    """A matrix of readers and holders."""

    def __init__(self) -> None:
        self._source = ColumnDataSource(name="p2p-links")
        self.root = _figure(
            "p2p-links-plot",
            x_range=FactorRange(),
            x_axis_label="holder",
            y_axis_label="reader",
            tools="",
            toolbar_location=None,
            tooltips=_LINK_TIPS,
            min_width=380,
        )
        place = {"x": "holder", "y": "reader", "source": self._source}
        colour = linear_cmap("share", _PALETTE, low=0, high=1, nan_color=_FAINT)
        cells = self.root.rect(
            **place, width=0.92, height=0.92, color=colour, line_color="outline", line_width=2
        )
        self._labels = self.root.text(
            **place,
            text="label",
            text_color=linear_cmap("share", ["#ffffff", "#000000"], low=0, high=0.9),
            text_align="center",
            text_baseline="middle",
            text_font_size="12px",
        )
        bar = cells.construct_color_bar(
            title="of the best link of the same transport (in cells: GB/s)",
            formatter=NumeralTickFormatter(format="0%"),
            background_fill_color=None,
            height=8,
            padding=4,
        )
        self.root.add_layout(bar, "above")
        self.root.xaxis.update(major_label_orientation=0.6, major_label_policy=NoOverlap())
        self.root.xgrid.visible = False

    def draw(self, picture: Picture) -> None:
        """Show a picture."""
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


_LINK_TIPS = [
    ("reader", "@reader"),
    ("holder", "@holder"),
    ("GB/s", "@gbs{0.00} by @transport, @share{0%} of the best"),
    ("bytes", "@text"),
    ("waited", "@waited_s{0.000} s"),
    ("tasks", "@tasks"),
    ("fell back", "@fallback"),
]


class StagesPlot:
    """Bars over time, a row a worker."""

    def __init__(self) -> None:
        self._source = ColumnDataSource(name="p2p-stages")
        self.root = _figure(
            "p2p-stages-plot",
            x_range=Range1d(0, 1),
            x_axis_label="seconds",
            tools="xpan,xwheel_zoom,xbox_zoom,reset",
            active_scroll="xwheel_zoom",
            tooltips=_STAGE_TIPS,
            min_width=480,
        )
        self._bars = self.root.quad(
            source=self._source,
            fill_color=factor_cmap("part", _PARTS, PARTS),
            line_color="#ffffff",
            line_width=0.5,
            legend_field="part",
        )
        self.root.toolbar.logo = None
        legend = self.root.legend[0]
        legend.update(orientation="horizontal", padding=2, margin=0)
        legend.update(background_fill_color=None, border_line_color=None)
        self.root.add_layout(legend, "above")

    def draw(self, picture: Picture) -> None:
        """Show a picture."""
        chart = picture.stages
        self.root.title.text = chart.title
        self.root.y_range.factors = chart.workers[::-1]
        self._bars.glyph.line_alpha = 1.0 if len(chart.workers) <= _MOST_LABELLED else 0.0
        if self._source.data != chart.columns:  # or what is zoomed stays so
            self.root.x_range.update(start=0, end=max(chart.columns["right"], default=1))
            self._source.data = chart.columns


_STAGE_TIPS = [
    ("", "@part"),
    ("of", "@name, block @block"),
    ("on", "@worker"),
    ("from", "@holder by @transport"),
    ("bytes", "@nbytes{0.00 ib}"),
    ("seconds", "@seconds{0.0000}"),
    ("failed", "@error"),
]

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
_WIDTHS = {
    "operation": 110,
    "shape": 130,
    "transports": 110,
    "progress": 100,
    "blocks": 90,
    "steps": 170,
}


class RunsTable:
    """The runs, newest first."""

    def __init__(self) -> None:
        self._source = ColumnDataSource(name="p2p-runs")
        escaped = HTMLTemplateFormatter(template="<%- value %>")
        bar = HTMLTemplateFormatter(template=_PROGRESS)
        columns = [
            TableColumn(
                field=name,
                title=_TITLES.get(name, name),
                width=_WIDTHS.get(name, 70),
                formatter=bar if name == "progress" else escaped,
            )
            for name in TABLE
        ]
        self.root = DataTable(
            source=self._source,
            name="p2p-runs-table",
            columns=columns,
            index_position=None,
            sortable=False,
            reorderable=False,
            selectable=False,
            stylesheets=[_TABLE_CSS],
            sizing_mode="stretch_both",
        )

    def draw(self, picture: Picture) -> None:
        """Show a picture."""
        self._source.data = picture.runs


class Page:
    """All of them."""

    def __init__(self) -> None:
        self._parts = links, stages, runs = LinksPlot(), StagesPlot(), RunsTable()
        upper = row(links.root, stages.root, sizing_mode="stretch_both", min_height=360)
        runs.root.update(height=220, sizing_mode="stretch_width")
        self.root = column(upper, runs.root, sizing_mode="stretch_both")

    def draw(self, picture: Picture) -> None:
        """Show a picture."""
        for part in self._parts:
            part.draw(picture)
