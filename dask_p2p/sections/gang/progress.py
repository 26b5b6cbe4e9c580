"""Monitoring of a rank: a record while its function runs, and one when it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from dask_p2p.engine.context import TaskContext, recorded
from dask_p2p.monitoring.records import REASON_CHARS, Stage, TaskRecord
from dask_p2p.monitoring.tables import pace_text
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.one_rank import ONE_RANK
from dask_p2p.types import DType, Key

logger = logging.getLogger(__name__)

_LOG_S = 10.0  # time between lines of the log
#: Name of the exchanges between ranks, used like a transport's name.
LINK = "connection"


def is_logged() -> bool:
    """Return whether the log of this process takes lines of progress."""
    return logger.isEnabledFor(logging.INFO)


@dataclass(slots=True)
class Progress:
    """Progress of a function. Its own thread writes, others read."""

    step: int = 0  # steps done
    steps: int = 0  # total number of steps; 0 if unknown
    first: int = 0  # first step of this attempt
    logs: bool = False  # whether this rank logs its progress; checked in each step
    _last: tuple[int, float] = (0, 0.0)  # step and time of the last line

    def advance(self, step: int) -> None:
        """Set the number of steps done; log it from time to time."""
        self.step = step
        if self.logs:
            self._log(time.monotonic())

    def _log(self, now_s: float) -> None:
        last, last_s = self._last
        if not last_s:
            self._last = self.step, now_s
        elif now_s - last_s >= _LOG_S:
            rate = (self.step - last) / (now_s - last_s)
            logger.info("%s", pace_text(self.step, self.steps, rate, 0.0))
            self._last = self.step, now_s


@dataclass
class Watch:
    """Records a rank's function with its worker, while it runs and afterwards."""

    key: Key  # key of the rank's task
    ranks: RankGrid  # partition of the arrays
    rank: int
    #: Data type and shape of the first output; None: unknown.
    dtype: DType | None
    shape: tuple[float, ...] | None
    progress: Progress  # current step
    context: TaskContext  # of the worker's tasks
    connections: Connections = ONE_RANK  # connections to other ranks
    workers: Sequence[str] = ()  # addresses, by rank
    attempt: int = 1
    start_s: float = field(default_factory=time.time)

    def recorded(self) -> AbstractContextManager[dict[str, Any]]:
        """Return a context for the function: see `dask_p2p.engine.context.recorded`."""
        return recorded(self.context, self.key, self._record, BaseException)

    def _record(self, is_running: bool = False, error: str = "", nbytes: int = 0) -> TaskRecord:
        """Return a record of the current state. Thread-safe.

        `error` is the reason why the function, or the attempt, has ended early. `nbytes` is the
        size of the rank's outputs.
        """
        ranks, progress, is_made = self.ranks, self.progress, not error
        return TaskRecord(
            key=self.key,
            start_s=self.start_s,
            stop_s=time.time(),
            stages=self._stages(),
            worker=self.context.address,
            shape=ranks.shape(self.rank) if is_made else (),
            dtype="" if self.dtype is None else str(self.dtype),
            nbytes=nbytes,
            array_shape=self.shape,
            blocks=ranks.grid,
            axes=tuple(range(len(ranks.grid))),
            step=progress.step,
            steps=progress.steps,
            first_step=progress.first,
            attempt=self.attempt,
            error=error[:REASON_CHARS],
            wanted_bytes=0 if is_running else None,
        )

    def _stages(self) -> tuple[Stage, ...]:
        received = sorted(self.connections.received)
        return tuple(Stage(self.workers[r], LINK, n, waited_s) for r, n, waited_s in received)
