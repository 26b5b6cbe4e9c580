"""Draw results of `python -m benchmarks`: time against size, and the fraction of the limit.

    python benchmarks/chart.py benchmarks/results/h200-x4.json -o benchmarks/results/h200-x4.svg

Several files go into one chart, where labels name the machine if there are several.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

OURS = "dask_p2p"
LIMIT = "copy engines (limit)"
#: Dask's own time: no transfer to compare with the limit.
FLOOR = "one no-op layer"
#: Other arrays are not drawn; older reports do not name this one.
EVEN = "even slabs"
#: Our exchange alone, without Dask's own time.
EXCHANGE = "dask_p2p, exchange only"

#: Colour and marker of each way, the same in all charts.
STYLES = {
    OURS: ("#d1495b", "o"),
    EXCHANGE: ("#d1495b", "o"),
    LIMIT: ("#222222", "_"),
    "torch + NCCL": ("#2e8b57", "s"),
    "torch DTensor": ("#b56576", "p"),
    "JAX": ("#e09f3e", "D"),
    "mpi4py-fft": ("#7f5539", "P"),
    "dask tasks": ("#30638e", "^"),
    "dask p2p": ("#7b5ea7", "v"),
    FLOOR: ("#999999", "."),
}
OTHER_COLOURS = ("#00798c", "#8d6a9f", "#6b705c", "#b56576")
#: Line styles by machine and dtype.
LINES = ("-", "--", ":", "-.")

#: Fixed ids and no date: the same results give the same file.
SETTINGS: Any = {"svg.hashsalt": "dask-p2p", "font.size": 9.0}
METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


@dataclass(slots=True)
class Series:
    """One way on one machine with one dtype."""

    way: str
    machine: str
    dtype: str
    median_s: dict[int, float] = field(default_factory=dict)  # by the matrix's bytes
    rows: dict[int, int] = field(default_factory=dict)  # of the matrix, by its bytes


def machine(report: dict[str, Any]) -> str:
    """Name the hardware of a report.

    >>> machine({"workers": 2, "kind": "cupy", "hardware": {"gpus": ["NVIDIA H200"] * 4}})
    '2 x NVIDIA H200'
    """
    hardware = report["hardware"]
    gpus = hardware["gpus"] if report["kind"] == "cupy" else []
    if not gpus:
        workers = report.get("workers") or 4
        return f"{workers} workers on {hardware['cpu_count']} x {hardware['cpu']}"
    return f"{report.get('workers') or len(gpus)} x {gpus[0]}"


def dtype_of(row: dict[str, Any], report: dict[str, Any]) -> str:
    """Return the dtype of a row; older reports name it once for all."""
    return str(row.get("dtype") or report["dtype"])


def read_series(reports: Iterable[dict[str, Any]]) -> list[Series]:
    """Collect the medians of square matrices in even slabs; failures are left out."""
    series_by_key: dict[tuple[str, str, str], Series] = {}
    for report in reports:
        for row in report["rows"]:
            square = row.get("case", EVEN) == EVEN and len({*row.get("shape", ())}) <= 1
            if "failed" in row or not square:
                continue
            dtype = dtype_of(row, report)
            times_s = {row["way"]: row["median_s"]}
            if row["way"] == OURS and row.get("exchange_s"):
                times_s[EXCHANGE] = median(row["exchange_s"])
            for way, time_s in times_s.items():
                key = way, machine(report), dtype
                series = series_by_key.setdefault(key, Series(*key))
                series.median_s[row["matrix_bytes"]] = time_s
                series.rows[row["matrix_bytes"]] = row["size"]
    order = [*STYLES, *sorted({way for way, _, _ in series_by_key} - set(STYLES))]
    return sorted(series_by_key.values(), key=lambda series: order.index(series.way))


def fractions(series: Series, all_series: Sequence[Series]) -> dict[int, float]:
    """Return the limit's time over this one's, where the limit was measured, by bytes."""
    for rival in all_series:
        if (rival.way, rival.machine, rival.dtype) == (LIMIT, series.machine, series.dtype):
            return {
                nbytes: rival.median_s[nbytes] / time_s
                for nbytes, time_s in sorted(series.median_s.items())
                if nbytes in rival.median_s
            }
    return {}


def caption(reports: Sequence[dict[str, Any]]) -> str:
    """Return the machine, date and commit of each report, one a line."""
    lines = []
    for report in reports:
        parts = [machine(report)]
        if report["kind"] == "cupy" and (driver := report["hardware"].get("driver")):
            parts.append(f"driver {driver}")
        parts.append(time.strftime("%Y-%m-%d", time.gmtime(report["started"])))
        parts += [f"commit {report['commit'][:12]}"] if report.get("commit") else []
        lines.append(", ".join(parts))
    return "\n".join(dict.fromkeys(lines))


def draw(reports: Sequence[dict[str, Any]]) -> Figure:
    """Draw the chart of these reports; the right panel needs a report with a limit."""
    all_series = read_series(reports)
    if not all_series:
        raise ValueError("these results have no square matrix in even slabs to draw")
    compared = [one for one in all_series if one.way != LIMIT and not one.way.startswith(FLOOR)]
    limited = {id(one): f for one in compared if (f := fractions(one, all_series))}
    figure = Figure(layout="constrained")
    figure.set_figwidth(11.0 if limited else 6.5)
    first_panel, *right = figure.subplots(1, 2 if limited else 1, squeeze=False)[0]
    # The exchange alone makes no result, so it appears in the right panel only.
    times_ms = {
        id(one): {nbytes: time_s * 1e3 for nbytes, time_s in one.median_s.items()}
        for one in all_series
        if one.way != EXCHANGE
    }
    plot(first_panel, all_series, times_ms, "Time of a transpose", "median time, ms")
    first_panel.set_yscale("log")
    first_panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    first_panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    first_panel.yaxis.set_minor_formatter(NullFormatter())
    for panel in right:
        label = "time of the copy engines' all-to-all / median time"
        plot(panel, all_series, limited, "Fraction of the copy-engine limit", label)
        highest = max(max(values.values()) for values in limited.values())
        panel.axhline(1.0, color=STYLES[LIMIT][0], linewidth=1.0)
        panel.set_ylim(0.0, 1.05 * max(1.0, highest))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    explain(figure, reports, all_series)
    return figure


def explain(
    figure: Figure, reports: Sequence[dict[str, Any]], all_series: Sequence[Series]
) -> None:
    """Add the legend, and the title with machines, dtypes and commits."""
    lines = {str(line.get_label()): line for panel in figure.axes for line in panel.get_lines()}
    shown = {label: line for label, line in lines.items() if not label.startswith("_")}
    columns = 1 if any(len(label) > 40 for label in shown) else 4
    options: Any = {"loc": "outside lower center", "ncols": columns, "fontsize": 8}
    options |= {"frameon": False, "title": caption(reports), "title_fontsize": 7.5}
    legend = figure.legend([*shown.values()], [*shown], **options)
    legend.get_title().set_color("#555555")
    figure.set_figheight(5.4 + 0.2 * (-(-len(shown) // columns) + len(reports)))
    dtypes = ", ".join(dict.fromkeys(series.dtype for series in all_series))
    machines = "; ".join(dict.fromkeys(series.machine for series in all_series))
    title = f"Square matrix in row slabs, transposed into row slabs: {dtypes}\n{machines}"
    figure.suptitle(title, fontsize=11)


def plot(
    panel: Any,
    all_series: Sequence[Series],
    values: dict[int, dict[int, float]],
    title: str,
    label: str,
) -> None:
    """Draw a line for each series that has values, with a mark for each size in bytes."""
    machines = list(dict.fromkeys(series.machine for series in all_series))
    dtypes = list(dict.fromkeys(series.dtype for series in all_series))
    unknown_ways = sorted({series.way for series in all_series} - set(STYLES))
    drawn = [series for series in all_series if id(series) in values]
    for series in drawn:
        style_number = unknown_ways.index(series.way) if series.way in unknown_ways else 0
        style = STYLES.get(series.way, (OTHER_COLOURS[style_number % len(OTHER_COLOURS)], "x"))
        names = [series.way]
        names += [series.machine] if len(machines) > 1 else []
        names += [series.dtype] if len(dtypes) > 1 else []
        variant = machines.index(series.machine) * len(dtypes) + dtypes.index(series.dtype)
        panel.plot(
            *zip(*sorted(values[id(series)].items()), strict=True),
            label=", ".join(names),
            color=style[0],
            marker=style[1],
            markersize=5,
            linestyle=LINES[variant % len(LINES)],
            linewidth=1.0 if series.way in (EXCHANGE, FLOOR) else 1.7,
            markerfacecolor="white" if series.way == EXCHANGE else style[0],
        )
    panel.set_ylabel(label)
    panel.set_title(title)
    size_axis(panel, drawn)
    panel.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)


def size_axis(panel: Any, drawn: Sequence[Series]) -> None:
    """Label the measured sizes, with rows too if there is one dtype."""
    rows = {nbytes: count for series in drawn for nbytes, count in series.rows.items()}
    one_dtype = len({series.dtype for series in drawn}) == 1
    tick_sizes: list[int] = []
    for nbytes in sorted(rows):  # matrices of one size in several dtypes differ by some rows
        if not tick_sizes or nbytes > 1.1 * tick_sizes[-1]:
            tick_sizes.append(nbytes)
    names = [size_name(nbytes) for nbytes in tick_sizes]
    if one_dtype:
        names = [
            f"{name}\n{rows[nbytes]} rows" for name, nbytes in zip(names, tick_sizes, strict=True)
        ]
    panel.set_xscale("log", base=2)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticks(tick_sizes, names)


def size_name(size_bytes: int) -> str:
    """Name a number of bytes.

    >>> size_name(2**36), size_name(3 * 2**19)
    ('64 GiB', '1.5 MiB')
    """
    power = (size_bytes.bit_length() - 1) // 10
    return f"{size_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def save(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the chart of these reports as SVG or PNG, by its name."""
    with mpl.rc_context(SETTINGS):
        # One figure a file: a second layout of the same figure differs slightly.
        draw(reports).savefig(path, dpi=150, metadata=METADATA[path.suffix.removeprefix(".")])


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="JSON of python -m benchmarks")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        type=Path,
        help="SVG or PNG to write; repeatable. Default: both, in the folder of the first result",
    )
    parser.add_argument("--dtype", action="append", help="repeatable. Default: all")
    parser.add_argument("--way", action="append", help="repeatable. Default: all")
    options = parser.parse_args(arguments)
    outputs = options.output or [options.results[0].with_suffix(s) for s in (".svg", ".png")]
    for path in outputs:
        if path.suffix.removeprefix(".") not in METADATA:
            parser.error(f"expected a name that ends in .svg or .png, got {path}")
    reports = [json.loads(path.read_text("utf-8")) for path in options.results]
    for report in reports:
        report["rows"] = [
            row
            for row in report["rows"]
            if (not options.dtype or dtype_of(row, report) in options.dtype)
            and (not options.way or row["way"] in options.way)
        ]
    for path in outputs:
        save(reports, path)
        print(path)


if __name__ == "__main__":
    main()
