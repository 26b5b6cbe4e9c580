"""The time of the next checkpoint of a resident gang."""

from __future__ import annotations

import time

from dask_p2p import tuning
from dask_p2p.fusing.resident.command_log import CommandLog
from dask_p2p.fusing.resident.events import Ranks, workers_of


class KeepingRule:
    """Decides when a checkpoint is due."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def restart(self) -> None:
        """Make a checkpoint due soon: Dask bounds the losses of workers between two of them."""
        self._last_s = float("-inf")

    def is_due(self, log: CommandLog, ranks: Ranks) -> bool:
        """Return whether a checkpoint is due, after a call."""
        if log.is_keeping:
            return False
        if len(workers_of(ranks)) < 2:  # its loss would take all checkpoints
            return log.since_kept >= log.most
        most, most_s = tuning.current.kept_commands, tuning.current.kept_s
        is_due = log.since_kept >= most or time.monotonic() - self._last_s >= most_s
        if is_due:
            self._last_s = time.monotonic()
        return is_due
