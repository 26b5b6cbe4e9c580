"""One line for each run, in the log of the scheduler: where ``p2p.log-runs`` asks for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from math import prod

from dask_p2p.monitoring.records import Record, RecordLog
from dask_p2p.monitoring.runs import Run, cells, runs_of

__all__ = ["RunLog", "log_runs"]

#: Dask shows the records of this logger's parent at the level INFO, and `get_scheduler_logs` too.
logger = logging.getLogger("distributed.scheduler.dask_p2p")

_LOOK_S = 1.0
_QUIET_S = 5.0  # at least; after that a run that lacks blocks has ended: nobody wants them


class RunLog:
    """Finds out which runs have ended. Each is told once."""

    def __init__(self) -> None:
        self._open: list[Record] = []

    def add(self, records: Iterable[Record]) -> None:
        """Take new records."""
        self._open += records

    def ended(self, now_s: float) -> list[Run]:
        """Return the runs that have ended since the last call, the oldest first.

        Parameters
        ----------
        now_s
            Seconds since the epoch.
        """
        runs = runs_of(self._open)
        newer: set[str] = set()  # arrays of which there is a later run
        ended: list[Run] = []
        open_: list[Run] = []
        for run in runs:
            is_complete = len(run.made) >= prod(run.blocks) or run.name in newer
            is_quiet = now_s - run.stop_s > max(_QUIET_S, 2 * run.exchange_s)
            (ended if is_complete or is_quiet else open_).append(run)
            newer.add(run.name)
        self._open = [record for run in open_ for record in run.records]
        return ended[::-1]


async def log_runs(
    records: RecordLog, fetch: Callable[[], Awaitable[object]], goes_on: Callable[[], bool]
) -> None:
    """Log runs, once a second.

    Parameters
    ----------
    records
        Where new records come to be.
    fetch
        Brings them there.
    goes_on
        Whether to look again.
    """
    log = RunLog()
    seen = records.count
    while True:
        await asyncio.sleep(_LOOK_S)
        if not goes_on():
            return
        await fetch()
        first, new = records.since(seen)
        seen = first + len(new)
        log.add(new)
        for run in log.ended(time.time()):
            logger.info("dask_p2p: %s", _line(run))


def _line(run: Run) -> str:
    row = cells(run)
    text = (
        f"{row['operation']} of {row['shape']} {row['dtype']}, {row['blocks']} blocks: moved "
        f"{row['moved']} in {row['wall']} ({row['GB/s']} GB/s) by {row['transports']}"
    )
    if run.attempts > len(run.made):
        text += f", {run.attempts} attempts"
    return text + (f", {len(run.fallbacks)} fallbacks" if run.fallbacks else "")
