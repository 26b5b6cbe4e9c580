"""``dask p2p trace``: writes a cluster's last runs as Chrome trace events."""

from __future__ import annotations

import click

from dask_p2p.cli._options import COUNT, connect, one_line_errors, pluralize


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--scheduler", metavar="ADDRESS", required=True, help="Address of the scheduler.")
@click.option(
    "--runs",
    type=COUNT,
    metavar="N",
    default=10,
    show_default=True,
    help="Number of runs to write, at most.",
)
def trace(file: str, scheduler: str, runs: int) -> None:
    """Write the last runs of a cluster to FILE as a trace.

    Open it in https://ui.perfetto.dev: it shows tasks, their stages, and the regions that each
    worker served over time.
    """
    from dask_p2p.monitoring.runs import last_runs

    with one_line_errors():
        with connect(scheduler) as client:
            found = last_runs(client, runs)
        found.to_trace(file)
    tasks = pluralize(sum(run.attempts for run in found), "attempt")
    click.echo(f"{file}: {pluralize(len(found), 'run')}, {tasks}. Open it in ui.perfetto.dev.")
