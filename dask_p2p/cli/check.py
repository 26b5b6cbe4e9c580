"""``dask p2p check``: shows transports and speeds between workers, and any problems."""

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
    """Show transports and speeds between workers, and any problems.

    Ends with status 1 if no transport joins a pair of workers.
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
    """Return a client of the given cluster, or of a new one on this machine, as a context."""
    if scheduler is None:
        spec = shared.choose_cluster(workers, cpu)
        return shared.own_cluster(spec.workers, gpus=bool(spec.gpus))
    if workers or cpu:
        raise click.UsageError(
            "--workers and --cpu are for a cluster on this machine, not for --scheduler"
        )
    return shared.connect(scheduler)
