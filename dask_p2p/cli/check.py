"""``dask p2p check``: how workers reach each other, how fast, and what is in the way."""

from __future__ import annotations

from typing import Any

import click

from dask_p2p.cli import _options as shared


@click.command()
@shared.scheduler_option
@shared.workers_option
@shared.cpu_option
@click.pass_context
def check(ctx: click.Context, scheduler: str | None, workers: int | None, cpu: bool) -> None:
    """Show how workers reach each other, how fast, and what is in the way.

    Ends with status 1 if there is a pair of workers that no transport joins.
    """
    from dask_p2p.tools.check import check as find

    with shared.one_line_errors(), _cluster(scheduler, workers, cpu) as client:
        if scheduler is not None:
            shared.worker_count(client)  # there is at least one
        report = find(client)
    click.echo(report)
    if any(link.error for link in report.links):
        ctx.exit(1)


def _cluster(scheduler: str | None, workers: int | None, cpu: bool) -> Any:
    """Give a client of the cluster named, or of one on this machine that ends with the command."""
    if scheduler is None:
        spec = shared.choose_cluster(workers, cpu)
        return shared.own_cluster(spec.workers, gpus=bool(spec.gpus))
    if workers or cpu:
        raise click.UsageError("--workers and --cpu are for a cluster that is started here")
    return shared.connect(scheduler)
