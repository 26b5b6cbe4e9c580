"""A line of text that shows the steps of a running `iterate` or `spmd`."""

from __future__ import annotations

import sys
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TextIO

from dask.utils import format_time
from distributed import futures_of, wait

from dask_p2p.errors import InputError
from dask_p2p.inputs import checked_client
from dask_p2p.monitoring.runs import Run, fetch_records, runs_of
from dask_p2p.types import Client

_WIDTH = 16  # characters of the bar
_LOOK_S = 0.8  # time between two requests for records: each of them takes milliseconds from ranks
_MOST_RUNS = 50  # that may be newer than a run that has ended


def progress(*given: Any, client: Client | None = None, file: TextIO | None = None) -> None:
    """Show the steps of a running `iterate` or `spmd` until its results are there.

    The line has a bar, the number of steps, steps per second, the time left, and the largest
    fraction of its time that a rank waited for others. It moves at least once a second, in
    terminals and in notebooks.

    Parameters
    ----------
    *given : future or collection
        Futures, or collections that were persisted. The function returns when all of them are
        finished or have failed.
    client : distributed.Client, optional
        The client. By default the current one.
    file : file, optional
        Text file for the line. By default the standard output.

    Raises
    ------
    InputError
        If nothing is given that runs on the cluster, or the client is closed or asynchronous.
    ValueError
        If there is no client.
    """
    client = checked_client(client)
    futures, out = futures_of(list(given)), sys.stdout if file is None else file
    if client.asynchronous:
        raise InputError(
            "client: expected a synchronous client, got an asynchronous one. Await "
            "dask_p2p.last_runs(client), which lists runs under way."
        )
    if not futures:
        raise InputError(
            "expected futures or a persisted collection, got none: a lazy one does not run yet. "
            "Persist it, x = x.persist(), or compute it, client.compute(x)."
        )
    shown, name = "", ""
    while True:
        is_over = all(future.done() for future in futures)
        records = client.sync(fetch_records, client, _MOST_RUNS if is_over else 0)
        runs = [run for run in runs_of(records) if run.latest]
        if run := next((run for run in runs if run.under_way or run.name == name), None):
            line, name = _line(run), run.name
            out.write("\r" + line.ljust(len(shown)))
            out.flush()
            shown = line
        if is_over:
            break
        with suppress(TimeoutError, CancelledError):
            wait(futures, timeout=_LOOK_S)
    if shown:
        out.write("\n")


def _line(run: Run) -> str:
    """Return the line for one run.

    >>> from types import SimpleNamespace
    >>> _line(SimpleNamespace(
    ...     operation="p2p-iterate", steps=250, all_steps=1000, steps_per_s=50.0, waited_share=0.1
    ... ))
    'p2p-iterate [####            ] 250 of 1000 steps, 50/s, 15.00 s left, 10% waited'
    """
    done, total = run.steps, run.all_steps
    filled = _WIDTH * done // total if total else 0
    parts = [f"{done} of {total} steps" if total else f"{done} steps"]
    if run.steps_per_s > 0:
        parts.append(f"{run.steps_per_s:.3g}/s")
        if total > done:
            parts.append(f"{format_time((total - done) / run.steps_per_s)} left")
    parts.append(f"{run.waited_share:.0%} waited")
    return f"{run.operation} [{'#' * filled}{' ' * (_WIDTH - filled)}] {', '.join(parts)}"
