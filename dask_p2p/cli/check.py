"""``dask p2p check``: how workers reach each other, how fast, and what is in the way."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from dask_p2p.cli._options import (
    choose_cluster,
    cpu_option,
    one_line_errors,
    scheduler_option,
    start,
    workers_option,
)
from dask_p2p.cli._tables import output, speed_text, table

if TYPE_CHECKING:
    from rich.table import Table

    from dask_p2p.diagnosis import Report

__all__ = ["check"]

_NO_PAIR = (
    "There is one worker only, and no pair of workers to check. If there should be more, see "
    "whether they have joined, and run this again."
)


@click.command()
@scheduler_option
@workers_option
@cpu_option
@click.pass_context
def check(ctx: click.Context, scheduler: str | None, workers: int | None, cpu: bool) -> None:
    """Show how workers reach each other, how fast, and what is in the way.

    Ends with status 1 if there is a pair of workers that no transport joins.
    """
    from dask_p2p import diagnosis
    from dask_p2p.registration import register

    console = output()
    with one_line_errors(), start(choose_cluster(workers, cpu, scheduler)) as client:
        if scheduler is None:
            register(client)
        report = diagnosis.check(client)
    pairs = _matrices(report) if len(report.workers) > 1 else [_NO_PAIR]
    for shown in (_workers_table(report), *_hosts(report), *pairs, *_problems(report)):
        console.print(shown)
        console.print()
    if any(link.error for link in report.links):
        ctx.exit(1)


def _workers_table(report: Report) -> Table:
    result = table("worker", "host", "address", "blocks", "GPU", "RMM", "pool", "kept for readers")
    for number, worker in enumerate(report.workers):
        result.add_row(
            str(number),
            worker.host,
            worker.address,
            worker.kind,
            worker.gpu or "-",
            worker.memory_resource or "-",
            "-" if worker.pool_bytes is None else f"{worker.pool_bytes / 2**30:.1f} GiB",
            f"{worker.leased_bytes / 2**20:.1f} MiB",
        )
    return result


def _hosts(report: Report) -> list[Table]:
    """Return what is used between hosts, and what is in the way, where there are several."""
    if len({worker.host for worker in report.workers}) < 2:
        return []
    head, *rows = report.host_rows()
    result = table(*head, title="Between hosts")
    for row in rows:
        result.add_row(*row)
    return [result]


def _matrices(report: Report) -> list[Any]:
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
    addresses = [worker.address for worker in report.workers]
    result = table("from", *map(str, range(len(addresses))), title=title)
    for number, reader in enumerate(addresses):
        cells = ["-" if reader == holder else cell((reader, holder)) for holder in addresses]
        result.add_row(f"to {number}", *cells)
    return result


def _problems(report: Report) -> Sequence[str]:
    if not report.problems:
        return ["Nothing is in the way."] if len(report.workers) > 1 else []
    numbers = {worker.address: str(number) for number, worker in enumerate(report.workers)}
    return [
        f"Worker {', '.join(numbers[a] for a in problem.workers)}: {problem.what}.\n"
        f"  {problem.cure}."
        for problem in report.problems
    ]
