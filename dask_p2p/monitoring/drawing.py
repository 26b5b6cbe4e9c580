"""The plots and the table of the pages, as bokeh's models. Only `dashboard` imports this."""

from __future__ import annotations

from typing import Any, NamedTuple

from bokeh.layouts import column, row
from bokeh.models import (
    ColorBar,
    ColumnDataSource,
    DataTable,
    FactorRange,
    FixedTicker,
    HoverTool,
    HTMLTemplateFormatter,
    InlineStyleSheet,
    LinearColorMapper,
    NumberFormatter,
    NumeralTickFormatter,
    Range1d,
    TableColumn,
    Title,
)
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.themes import Theme as BokehTheme

from dask_p2p.monitoring.bars import PARTS
from dask_p2p.monitoring.charts import Columns
from dask_p2p.monitoring.picture import Picture

__all__ = ["THEMES", "LinksPlot", "RunsTable", "StagesPlot", "Theme", "arranged"]

_PALETTE = Viridis256[48:]  # what is darker than that is lost on a dark page
_FELL_BACK = "#e8553d"
_COLOURS = {"waiting": "#e69f00", "transfer": "#3d8fd1", "kernel": "#1fa37a"}  # told apart by all
_MOST_LABELLED = 16  # workers whose cells have room for a number, and whose bars for outlines


class Theme(NamedTuple):
    """Colours of a page."""

    name: str
    other: str  # name of the other theme
    paper: str
    ink: str
    faint: str  # lines of a grid
    bar: str  # of navigation, and heads of a table

    @property
    def bokeh(self) -> BokehTheme:
        """For plots."""
        ink, faint, paper = self.ink, self.faint, self.paper
        nothing = {"background_fill_color": None}
        lines = ("axis_label_text", "major_label_text", "axis_line", "major_tick_line")
        axis = {f"{part}_color": ink for part in lines}
        bar = nothing | {"major_label_text_color": ink, "title_text_color": ink}
        legend = {"background_fill_color": paper, "label_text_color": ink}
        plot = nothing | {"border_fill_color": None, "outline_line_color": faint}
        attrs = {
            "Plot": plot,
            "Axis": axis | {"minor_tick_line_color": None},
            "Grid": {"grid_line_color": faint},
            "Title": {"text_color": ink},
            "ColorBar": bar,
            "BaseColorBar": bar,
            "Legend": legend | {"border_line_color": None},
            "Toolbar": {"logo": None},
        }
        return BokehTheme(json={"attrs": attrs})


THEMES = {
    "light": Theme("light", "dark", "#fafafa", "#222222", "#dddddd", "#eeeeee"),
    "dark": Theme("dark", "light", "#1c1e21", "#dfe1e4", "#3a3d42", "#2b2e33"),
}


def arranged(links: Any, stages: Any, runs: Any) -> Any:
    """Lay the parts of the page out."""
    upper = row(links, stages, sizing_mode="stretch_both", min_height=360)
    runs.update(height=220, sizing_mode="stretch_width")
    return column(upper, runs, sizing_mode="stretch_both")


def _replace(source: ColumnDataSource, columns: Columns) -> None:
    """Send columns to the page, unless it has them."""
    if source.data != columns:
        source.data = columns


def _label(axis: Any, workers: int) -> None:
    """Have labels of workers that do not lie on each other; what is pointed at is named anyway."""
    sizes = ((_MOST_LABELLED, "11px"), (2 * _MOST_LABELLED, "8px"))
    size = next((text for most, text in sizes if workers <= most), "0px")
    axis.update(major_label_text_font_size=size, major_tick_line_color=None)


class LinksPlot:
    """A matrix of readers and holders."""

    def __init__(self, theme: Theme) -> None:
        self._faint = theme.faint
        self.source = ColumnDataSource(name="p2p-links")
        self.root = figure(
            title=Title(text="Links"),
            name="p2p-links-plot",
            x_range=FactorRange(),
            y_range=FactorRange(),
            x_axis_label="holder",
            y_axis_label="reader",
            tools="",
            toolbar_location=None,
            min_width=380,
            sizing_mode="stretch_both",
        )
        mapper = LinearColorMapper(_PALETTE, low=0, high=1, nan_color=theme.faint)
        self._add_cells(mapper)
        percent = NumeralTickFormatter(format="0%")
        title = "of the best link of the same transport (in cells: GB/s)"
        bar = ColorBar(color_mapper=mapper, formatter=percent, title=title, height=8, padding=4)
        self.root.add_layout(bar, "above")
        self.root.xaxis.major_label_orientation = 0.6
        self.root.grid.visible = False
        self.root.add_tools(HoverTool(tooltips=_LINK_TIPS))

    def _add_cells(self, mapper: LinearColorMapper) -> None:
        self.root.rect(
            "holder",
            "reader",
            width=0.92,
            height=0.92,
            source=self.source,
            fill_color={"field": "share", "transform": mapper},
            line_color="outline",
            line_width="outline_px",
        )
        self.root.text(
            "holder",
            "reader",
            text="label",
            text_color="label_colour",
            source=self.source,
            text_align="center",
            text_baseline="middle",
            text_font_size="12px",
        )

    def draw(self, picture: Picture) -> None:
        """Show a picture."""
        chart = picture.links
        self.root.title.text = chart.title
        self.root.x_range.factors = chart.workers
        self.root.y_range.factors = chart.workers[::-1]
        for axis in (*self.root.xaxis, *self.root.yaxis):
            _label(axis, len(chart.workers))
        cells = chart.columns["cells"]
        labelled = len(chart.workers) <= _MOST_LABELLED
        fell_back = [bool(text) for text in cells["fallback"]]
        looks: Columns = {
            "outline": [_FELL_BACK if fell else self._faint for fell in fell_back],
            "outline_px": [(4 if fell else 1) if labelled else 2 * fell for fell in fell_back],
            "label": [f"{gbs:.3g}" if labelled and gbs == gbs else "" for gbs in cells["gbs"]],
            "label_colour": ["#000000" if share > 0.45 else "#ffffff" for share in cells["share"]],
        }
        _replace(self.source, cells | looks)


_LINK_TIPS = [
    ("reader", "@reader"),
    ("holder", "@holder"),
    ("GB/s", "@gbs{0.00} by @transport, @share{0%} of the best"),
    ("bytes", "@text"),
    ("tasks", "@tasks"),
    ("fell back", "@fallback"),
]


class StagesPlot:
    """Bars over time, a row a worker."""

    def __init__(self, theme: Theme) -> None:
        self.root = figure(
            title=Title(text="Stages"),
            name="p2p-stages-plot",
            x_axis_label="seconds",
            x_range=Range1d(0, 1),
            y_range=Range1d(0.5, -0.5),
            tools="xpan,xwheel_zoom,xbox_zoom,reset",
            active_scroll="xwheel_zoom",
            toolbar_location="right",
            min_width=480,
            sizing_mode="stretch_both",
        )
        self._bars = {}
        for part in PARTS:
            task = part == "task"
            self._bars[part] = bars = self.root.quad(
                source=ColumnDataSource(name=f"p2p-{part}"),
                fill_color=theme.ink if task else _COLOURS[part],
                fill_alpha=0.12 if task else 1.0,
                line_color=theme.ink if task else theme.paper,
                legend_label=part,
            )
            tips = _TASK_TIPS if task else [("", f"{part} of a stage"), *_STAGE_TIPS, *_TASK_TIPS]
            self.root.add_tools(HoverTool(renderers=[bars], tooltips=tips))
        self.root.ygrid.visible = False
        legend = self.root.legend[0]
        legend.update(orientation="horizontal", padding=2, margin=0, glyph_height=12)
        self.root.add_layout(legend, "above")

    def draw(self, picture: Picture) -> None:
        """Show a picture."""
        chart = picture.stages
        self.root.title.text = chart.title
        workers = chart.workers
        self.root.y_range.update(start=max(len(workers), 1) - 0.5, end=-0.5)
        self.root.yaxis.ticker = FixedTicker(ticks=[*range(len(workers))])
        self.root.yaxis.major_label_overrides = dict(enumerate(workers))
        _label(self.root.yaxis[0], len(workers))
        outlined = len(workers) <= _MOST_LABELLED
        if self._bars["task"].data_source.data != chart.columns["task"]:
            self.root.x_range.update(start=0, end=max(chart.columns["task"]["right"], default=1))
        for part, bars in self._bars.items():
            bars.glyph.line_alpha = 0.5 if outlined else 0.0
            _replace(bars.data_source, chart.columns[part])


_STAGE_TIPS = [
    ("holder", "@holder by @transport"),
    ("bytes", "@nbytes{0.00 ib}"),
    ("seconds", "@seconds{0.0000}"),
]
_TASK_TIPS = [("task", "@name, block @block"), ("on", "@worker"), ("failed", "@error")]

_PROGRESS = """
<div style="background: rgba(128,128,128,0.25); width: 100%; height: 100%; position: relative">
<div style="background: <%= state == 'failed' ? '#e8553d' : '#3d8fd1' %>;
opacity: <%= state == 'running' ? 1 : 0.35 %>; height: 100%; width: <%= 100 * value %>%"></div>
<span style="position: absolute; left: 6px; top: 0"><%= state == 'running' ?
Math.floor(100 * value) + ' %' : state %></span></div>
"""


class RunsTable:
    """The runs, newest first."""

    def __init__(self, theme: Theme) -> None:
        self.source = ColumnDataSource(name="p2p-runs")
        css = f"""
        .slick-header-column, .slick-header-columns {{ background: {theme.bar} !important; }}
        .slick-header-column, .slick-cell {{ color: {theme.ink} !important; }}
        .slick-row, .slick-row.odd {{ background: {theme.paper} !important; }}
        .slick-cell {{ border-color: {theme.faint} !important; background: none !important; }}
        """
        self.root = DataTable(
            source=self.source,
            name="p2p-runs-table",
            columns=[
                TableColumn(field=name, title=title, width=width, formatter=formatter)
                for name, title, width, formatter in _run_columns()
            ],
            index_position=None,
            sortable=False,
            reorderable=False,
            selectable=False,
            stylesheets=[InlineStyleSheet(css=css)],
            sizing_mode="stretch_both",
        )

    def draw(self, picture: Picture) -> None:
        """Show a picture."""
        _replace(self.source, picture.runs)


def _run_columns() -> list[tuple[str, str, int, Any]]:
    text = HTMLTemplateFormatter(template="<%- value %>")
    rate = NumberFormatter(format="0.00", text_align="right")
    count = NumberFormatter(format="0,0", text_align="right")
    return [
        ("start", "start", 70, text),
        ("operation", "operation", 110, text),
        ("shape", "shape", 130, text),
        ("dtype", "dtype", 60, text),
        ("blocks", "blocks", 70, text),
        ("axes", "axes", 60, text),
        ("progress", "progress", 100, HTMLTemplateFormatter(template=_PROGRESS)),
        ("moved", "moved", 80, text),
        ("least", "least", 80, text),
        ("exchange", "longest task", 80, text),
        ("wall", "wall", 80, text),
        ("gbs", "GB/s", 60, rate),
        ("transports", "transports", 110, text),
        ("made", "made", 50, count),
        ("attempts", "attempts", 60, count),
        ("fallbacks", "fallbacks", 60, count),
    ]
