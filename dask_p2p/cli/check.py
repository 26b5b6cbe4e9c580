"""``dask p2p check``: how workers reach each other, how fast, and what is in the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from dask_p2p.cli._options import (
    choose_site,
    connect,
    cpu_option,
    one_line_errors,
    start,
    workers_option,
)

if TYPE_CHECKING:
    from rich.table import Table

    from dask_p2p.diagnosis import Report

__all__ = ["check"]


@click.command()
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Cluster to look at.  [default: one that is started here, as dask p2p demo does]",
)
@workers_option
@cpu_option
@click.pass_context
def check(ctx: click.Context, scheduler: str | None, workers: int | None, cpu: bool) -> None:
    """Show how workers reach each other, how fast, and what is in the way.

    Ends with status 1 if there is a pair of workers that no transport joins.
    """
    from dask_p2p import diagnosis
    from dask_p2p.cli._tables import output

    if scheduler and (workers or cpu):
        raise click.UsageError("--workers and --cpu are for a cluster that is started here")
    console = output()
    with one_line_errors(), _client(scheduler, workers, cpu) as client:
        report = diagnosis.check(client)
    for shown in (_workers_table(report), *_matrices(report), *_problems(report)):
        console.print(shown)
        console.print()
    if any(link.error for link in report.links):
        ctx.exit(1)


@contextmanager
def _client(scheduler: str | None, workers: int | None, cpu: bool) -> Iterator[Any]:
    from dask_p2p.registration import register

    if scheduler is not None:
        with connect(scheduler) as client:
            yield client
    else:
        with start(choose_site(workers, cpu)) as client:
            register(client)
            yield client


def _workers_table(report: Report) -> Table:
    from dask_p2p.cli._tables import table

    made = table("worker", "address", "blocks", "GPU", "RMM", "pool", "kept for readers")
    for number, worker in enumerate(report.workers):
        made.add_row(
            str(number),
            worker.address,
            worker.kind,
            worker.gpu or "-",
            worker.memory_resource or "-",
            "-" if worker.pool_bytes is None else f"{worker.pool_bytes / 2**30:.1f} GiB",
            f"{worker.leased_bytes / 2**20:.1f} MiB",
        )
    return made


def _matrices(report: Report) -> list[Any]:
    from dask_p2p.cli._tables import speed_text

    links = {(link.reader, link.holder): link for link in report.links}
    good = [link for link in report.links if link.error is None]
    shown: list[Any] = [
        _matrix(report, "Transport", lambda pair: links[pair].transport or "none"),
        _matrix(report, "GB/s of one large block", lambda pair: f"{links[pair].gbs:.3g}"),
        _matrix(
            report,
            "Latency of a small block, ms",
            lambda pair: f"{links[pair].latency_s * 1e3:.2f}",
        ),
    ]
    if good:
        text = f"Median of all pairs: {speed_text(median(link.gbs for link in good))}"
        should = {worker.link_gbs for worker in report.workers if worker.link_gbs}
        if should:
            text += f"; the NVLinks of a GPU should carry {speed_text(min(should))} one way"
        shown.append(text)
    return shown


def _matrix(report: Report, title: str, cell: Any) -> Table:
    """Return a table with a row for each reader, and a column for each holder."""
    from dask_p2p.cli._tables import table

    addresses = [worker.address for worker in report.workers]
    made = table("from", *map(str, range(len(addresses))), title=title)
    for number, reader in enumerate(addresses):
        cells = ["-" if reader == holder else cell((reader, holder)) for holder in addresses]
        made.add_row(f"to {number}", *cells)
    return made


def _problems(report: Report) -> Sequence[str]:
    if not report.problems:
        return ["Nothing is in the way."]
    numbers = {worker.address: str(number) for number, worker in enumerate(report.workers)}
    return [
        f"Worker {', '.join(numbers[a] for a in problem.workers)}: {problem.what}.\n"
        f"  {problem.cure}."
        for problem in report.problems
    ]
