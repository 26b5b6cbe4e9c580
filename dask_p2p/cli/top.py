"""``dask p2p top``: links and runs of a cluster in a terminal, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any

import click
from dask.utils import format_bytes
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live

from dask_p2p.cli._options import connect, one_line_errors, running_option, runs_option
from dask_p2p.cli._signals import stoppable
from dask_p2p.cli._tables import output, table

if TYPE_CHECKING:
    from rich.table import Table

    from dask_p2p.monitoring.records import Record
    from dask_p2p.monitoring.runs import Runs

__all__ = ["top"]

# Of a run, those of `cells` that matter most.
_COLUMNS = (
    *("operation", "shape", "dtype", "blocks", "moved", "wall", "GB/s"),
    *("transports", "attempts", "fallbacks"),
)
_DROPPED = ("dtype", "blocks", "attempts", "fallbacks")  # on narrow consoles
_WIDE_COLUMNS = 110
_MOST_LINKS = 30
_QUICKEST_S = 0.1


@click.command()
@running_option
@runs_option
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=_QUICKEST_S),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="Look once, and end.")
def top(scheduler: str, runs: int, interval_s: float, once: bool) -> None:
    """Show the links and the last runs of a cluster, until Ctrl-C.

    Where the output is no terminal, each look is printed below the one before.
    """
    from dask_p2p.monitoring.runs import last_runs

    console = output()
    with one_line_errors(), connect(scheduler) as client:
        if once:
            console.print(_view(last_runs(client, runs), console.width))
            return
        with stoppable() as stopped, ExitStack() as stack:
            show: Callable[[Any], None] = console.print
            if console.is_terminal:
                live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
                show = partial(live.update, refresh=True)
            while not stopped():
                show(_view(last_runs(client, runs), console.width))
                next_s = time.monotonic() + interval_s
                while not stopped() and time.monotonic() < next_s:
                    time.sleep(_QUICKEST_S / 2)


def _view(runs: Runs, columns: int) -> Group:
    """Return what is shown of runs; on narrow consoles, of few `columns`, what matters most."""
    if not runs:
        return Group("No run yet, or the cluster lacks the plugin (dask_p2p.register).")
    links = _links(record for run in runs for record in run.records)
    return Group(_runs_table(runs, columns < _WIDE_COLUMNS), "", *links)


def _table(title: str, columns: Iterable[str]) -> Table:
    result = table(*columns, title=title)
    result.box, result.show_edge, result.pad_edge = SIMPLE_HEAD, False, False
    result.padding, result.collapse_padding = (0, 1), True
    return result


def _runs_table(runs: Runs, is_narrow: bool) -> Table:
    from dask_p2p.monitoring.runs import cells

    names = [name for name in _COLUMNS if not (is_narrow and name in _DROPPED)]
    result = _table("Runs", ("started", *names))
    for run in runs:
        row = cells(run)
        row["operation"] = row["operation"].removeprefix("p2p-")
        started = time.strftime("%H:%M:%S", time.localtime(run.start_s))
        result.add_row(started, *(row[name] for name in names))
    return result


def _links(records: Iterable[Record]) -> Iterable[Any]:
    """Return a table of who read from whom in these runs, those with most bytes first."""
    from dask_p2p.monitoring.links import links

    cells = links(records).columns["cells"]
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    rows.sort(key=lambda row: -row["nbytes"])
    result = _table("Links", ("reader", "holder", "transport", "tasks", "moved", "GB/s", "failed"))
    for row in rows[:_MOST_LINKS]:
        speed = "-" if isnan(row["gbs"]) else f"{row['gbs']:.3g}"
        moved = str(row["tasks"]), format_bytes(row["nbytes"]), speed
        failed = row["fallback"].partition(":")[0]
        result.add_row(row["reader"], row["holder"], row["transport"], *moved, failed)
    yield result
    if len(rows) > _MOST_LINKS:
        yield f"and {len(rows) - _MOST_LINKS} more links, with fewer bytes"
