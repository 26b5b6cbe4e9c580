"""What the commands show: numbers as text, tables, and a bar of progress."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dask_p2p.cli._options import Site
    from dask_p2p.measure import Exchange, Runs

__all__ = [
    "counted",
    "devices_text",
    "facts",
    "judge",
    "output",
    "progress",
    "shape_text",
    "shapes_text",
    "speed_text",
    "table",
    "transports_text",
    "ways_table",
]

_FILE_COLUMNS = 120
_SHAPES_SHOWN = 6
_ODD_PAIRS_SHOWN = 8


def output(*, to_stderr: bool = False) -> Console:
    """Return a console for results, whose words are printed as they are."""
    console = Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_COLUMNS  # a file has no edge to fold tables at
    return console


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table of numbers: the first column is of names, the others are set right."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for place, name in enumerate(columns):
        made.add_column(name, justify="right" if place else "left", overflow="fold")
    return made


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a borderless table of names and what they are."""
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


def counted(count: int, noun: str) -> str:
    """Put a number before a noun.

    >>> counted(1, "stage"), counted(2, "stage")
    ('1 stage', '2 stages')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape.

    >>> shape_text((192, 1024))
    '192 x 1024'
    """
    return " x ".join(map(str, shape)) or "one value"


def shapes_text(shapes: Iterable[Sequence[int]]) -> str:
    """Write how many there are of each shape.

    >>> shapes_text([(2, 5), (2, 5), (1, 5)])
    '2 of 2 x 5, 1 of 1 x 5'
    """
    counts = Counter(map(tuple, shapes))
    texts = [f"{count} of {shape_text(shape)}" for shape, count in counts.items()]
    if len(texts) > _SHAPES_SHOWN:
        texts[_SHAPES_SHOWN:] = [f"and {len(texts) - _SHAPES_SHOWN} more shapes"]
    return ", ".join(texts) or "none"


def devices_text(site: Site, names: Sequence[str]) -> str:
    """Write which workers there are, and on what.

    Parameters
    ----------
    site : Site
    names : sequence of str
        Of each worker's GPU or processor.
    """
    models = Counter(names)
    listed = ", ".join(f"{count} x {name}" for name, count in models.items())
    if site.scheduler is not None:
        return f"{counted(site.workers, 'worker')} of {site.scheduler}: {listed}"
    if site.gpus:
        return f"{counted(site.workers, 'worker')}, one a GPU: {listed}"
    return (
        f"{counted(site.workers, 'one-thread worker')} over TCP on {', '.join(models)}, "
        f"{counted(os.cpu_count() or 1, 'core')}"
    )


def speed_text(gbs: float) -> str:
    """Write a speed in GB (1e9 bytes) a second."""
    return f"{gbs:.3g} GB/s" if gbs < 1000 else f"{gbs:.0f} GB/s"


def transports_text(exchange: Exchange) -> str:
    """Write which transport each pair of workers used; workers are numbered by their addresses.

    All pairs of the most used transport are one number; those that differ are named.
    """
    pairs = exchange.pairs
    if not pairs:
        return "none, nothing moved"
    addresses = sorted({a for reader, holder, _ in pairs for a in (reader, holder)})
    number = {address: place for place, address in enumerate(addresses)}
    used: dict[str, list[str]] = {}
    for reader, holder, transport in sorted(pairs):
        used.setdefault(transport, []).append(f"{number[reader]}<-{number[holder]}")
    (most, usual), *others = sorted(used.items(), key=lambda item: -len(item[1]))
    if not others:
        return f"{most} for {'all ' if len(usual) > 1 else ''}{counted(len(usual), 'pair')}"
    texts = [f"{most} for {counted(len(usual), 'pair')}"]
    for transport, odd in others:
        shown = ", ".join(odd[:_ODD_PAIRS_SHOWN]) + (", ..." if len(odd) > _ODD_PAIRS_SHOWN else "")
        texts.append(f"{transport} for {counted(len(odd), 'pair')} ({shown})")
    return "; ".join(texts)


def ways_table(measured: Sequence[Runs], size_bytes: int, repeats: int) -> Table:
    """Return what was measured, with a column for each way.

    Parameters
    ----------
    measured : sequence of Runs
    size_bytes : int
        Of the array.
    repeats : int
        Runs of each way after its first.
    """
    from dask.utils import format_bytes, format_time

    from dask_p2p.measure import bandwidth_gbs

    made = table("", *[runs.name for runs in measured])

    def row(name: str, cell: Callable[[Runs], str], exchanged: bool = False) -> None:
        """Add a row; ways that failed have no cells in it, and Dask's none of what was moved."""
        empty = [r.failed is not None or (exchanged and not r.exchanges) for r in measured]
        made.add_row(name, *["-" if e else cell(r) for e, r in zip(empty, measured, strict=True)])

    row("first run", lambda r: format_time(r.first_s))
    row(f"median of {repeats} more", lambda r: format_time(r.median_s))
    row("quickest of them", lambda r: format_time(min(r.times_s)))
    row(
        "bandwidth, 2 x bytes / median", lambda r: speed_text(bandwidth_gbs(size_bytes, r.median_s))
    )
    row("wrong elements", lambda r: str(r.wrong))
    row("received by slowest worker", lambda r: speed_text(r.link_gbs), exchanged=True)
    row("moved", lambda r: format_bytes(r.exchanges[-1].moved_bytes), exchanged=True)
    row("least possible", lambda r: format_bytes(r.exchanges[-1].least_bytes or 0), exchanged=True)
    row("transport", lambda r: transports_text(r.exchanges[-1]), exchanged=True)
    return made


def judge(console: Console, measured: Sequence[Runs], elements: int) -> None:
    """Say which ways failed, and whether all elements are right.

    Raises
    ------
    click.ClickException
        If some are wrong: exit status 1.
    """
    for runs in measured:
        if runs.failed:
            console.print(f"{runs.name} failed: {runs.failed}")
    wrong = [f"{runs.wrong} of {runs.name}" for runs in measured if runs.wrong]
    if wrong:
        raise click.ClickException(f"of {elements} elements some are wrong: {', '.join(wrong)}")
    console.print(f"All {elements} elements are where they belong.")


@contextlib.contextmanager
def progress(total: int, doing: str) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, and nothing elsewhere; gives what is to be called at each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=False,  # the bar is on standard error: results stay where they belong
        transient=True,
    ) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)
