"""Output of the benchmarks: tables of ways, and a progress bar."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from statistics import median

import click
from dask.utils import format_bytes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.measure import Measured, Row
from benchmarks.options import AnyClusterSpec
from dask_p2p import cli as _options
from dask_p2p.inputs import pluralize
from dask_p2p.types import DType

#: Names of this package's ways, the reference for others.
OURS = "dask_p2p"
#: The rival that copies without transposing: the limit of these links.
LIMIT = "copy engines (limit)"

_WIDE_COLUMNS = 110
_FILE_COLUMNS = 120
_SHAPES_SHOWN = 6


def output(*, to_stderr: bool = False) -> Console:
    """Return a console that prints results without markup."""
    console = Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_COLUMNS  # a file has no width to fold tables to
    return console


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table with a column of names and right-aligned columns of numbers."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for place, name in enumerate(columns):
        result.add_column(name, justify="right" if place else "left", overflow="fold")
    return result


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as text.

    >>> shape_text((192, 1024))
    '192 x 1024'
    """
    return " x ".join(map(str, shape)) or "one value"


def shapes_text(shapes: Iterable[Sequence[int]]) -> str:
    """Return the number of arrays of each shape as text.

    >>> shapes_text([(2, 5), (2, 5), (1, 5)])
    '2 of 2 x 5, 1 of 1 x 5'
    """
    counts = Counter(map(tuple, shapes))
    texts = [f"{count} of {shape_text(shape)}" for shape, count in counts.items()]
    if len(texts) > _SHAPES_SHOWN:
        texts[_SHAPES_SHOWN:] = [f"and {len(texts) - _SHAPES_SHOWN} more shapes"]
    return ", ".join(texts) or "none"


def array_text(shape: Sequence[int], dtype: DType) -> str:
    """Return an array's shape, dtype and size as text."""
    size_bytes = prod(shape) * dtype.itemsize
    return f"{shape_text(shape)} {dtype}, {format_bytes(size_bytes)}"


def devices_text(spec: AnyClusterSpec, names: Sequence[str]) -> str:
    """Return the number of workers and the names of their GPUs or CPUs as text."""
    if spec.scheduler is None:
        return _options.devices_text(spec, names)
    listed = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
    return f"{pluralize(spec.workers, 'worker')} of {spec.scheduler}: {listed}"


def summary(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a borderless table of names and values."""
    result = Table.grid(padding=(0, 2))
    result.add_column(no_wrap=True, style="bold")
    result.add_column(overflow="fold")
    for name, value in rows:
        result.add_row(name, value)
    return result


def ways_table(rows: Sequence[Row], columns: int, title: str | None = None) -> Table:
    """Return the table of one array: a line for each way that did not fail.

    Consoles with few `columns` get only the most important figures.
    """
    measured = [row for row in rows if "failed" not in row]
    medians_s = {row["way"]: row["median_s"] for row in measured}
    ours_s, limit_s = medians_s.get(OURS), medians_s.get(LIMIT)
    figures: dict[str, Callable[[Row], str]] = {
        "first": lambda row: _ms(row["first_s"]),
        "median": lambda row: _ms(row["median_s"]),
        "best": lambda row: _ms(min(row["times_s"])),
        "before": lambda row: _ms(*row.get("before_s", ())),
        "exchange": lambda row: _ms(*row.get("exchange_s", ())),
        "after": lambda row: _ms(*row.get("after_s", ())),
        "GB/s": lambda row: _gbs(row["bandwidth_gbs"]) if row["wrong"] is not None else "",
        "link\nGB/s": lambda row: _gbs(row["link_gbs"]) if row["link_gbs"] else "",
        "wrong": lambda row: "" if row["wrong"] is None else str(row["wrong"]),
        "faster\nby": lambda row: f"{row['median_s'] / ours_s:.2f}" if ours_s else "",
        "of\nlimit": lambda row: f"{limit_s / row['median_s']:.1%}" if limit_s else "",
        "to\neven": lambda row: f"{row['median_to_even']:.2f}" if "median_to_even" in row else "",
    }
    cells = {name: [text(row) for row in measured] for name, text in figures.items()}
    dropped = ("best", "before", "after") if columns < _WIDE_COLUMNS else ()
    cells = {name: texts for name, texts in cells.items() if any(texts) and name not in dropped}
    result = table("times in ms", *cells, title=title)
    result.box, result.collapse_padding = SIMPLE_HEAD, True
    for column in result.columns[1:]:
        column.no_wrap = True  # a figure broken over two lines looks like two
    for place, row in enumerate(measured):
        result.add_row(row["way"], *(texts[place] for texts in cells.values()))
    return result


def _gbs(rate_gbs: float) -> str:
    return f"{rate_gbs:.3g}" if rate_gbs < 1000 else f"{rate_gbs:.0f}"


def _ms(*times_s: float) -> str:
    return f"{median(times_s) * 1e3:.2f}" if times_s else ""


def moved_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each way of this package: bytes moved, and pairs by transport."""
    lines = []
    for row in rows:
        if "pairs" in row:
            moved, least = format_bytes(row["moved_bytes"]), format_bytes(row["least_bytes"])
            used = Counter(pair["transport"] for pair in row["pairs"]).most_common()
            by = "; ".join(f"{name} for {pluralize(count, 'pair')}" for name, count in used)
            lines.append(f"{row['way']}: moved {moved}, least possible {least}; {by or 'no pair'}")
    return lines


def show_ways(console: Console, rows: Sequence[Row], title: str | None = None) -> None:
    """Print the table of one array, and the bytes that moved."""
    for part in (ways_table(rows, console.width, title), *moved_lines(rows)):
        console.print(part)


def report_correctness(console: Console, measured: Measured) -> None:
    """Print the ways that failed, and that all elements are right.

    Raises
    ------
    click.ClickException
        If some elements are wrong: exit status 1.
    """
    wrong_rows = []
    for case, rows in measured.items():
        for row in rows:
            if "failed" in row:
                console.print(f"{row['way']} failed: {row['failed']}")
            elif row["wrong"]:
                wrong_rows.append(f"{row['wrong']} of {prod(case.shape)} of {row['way']}")
    if wrong_rows:
        raise click.ClickException(f"some elements are wrong: {', '.join(wrong_rows)}")
    count = sum(prod(case.shape) for case in measured)
    console.print(f"All {count} elements are where they belong.")


@contextlib.contextmanager
def progress(total: int, doing: str) -> Iterator[Callable[[], None]]:
    """Show a bar on terminals only; yield the function to call after each step."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=False,  # results stay on standard output; the bar is on standard error
        transient=True,
    ) as bar:
        task = bar.add_task(doing, total=total)
        yield partial(bar.advance, task)
