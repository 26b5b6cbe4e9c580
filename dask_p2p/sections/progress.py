"""What a member tells of itself, while its function runs and after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dask_p2p.engine.context import TaskContext
from dask_p2p.monitoring.records import REASON_CHARS, Record, Stage
from dask_p2p.plans.members import Members
from dask_p2p.sections.links import Links
from dask_p2p.types import DType, Key

__all__ = ["LINK", "Progress", "Watch"]

#: In the place of a transport: what members send each other.
LINK = "link"


@dataclass(slots=True)
class Progress:
    """How far a function is: its own thread writes, others read."""

    step: int = 0  # steps that are done
    steps: int = 0  # of so many; 0 if that is not known
    first: int = 0  # where this attempt began


class Watch:
    """Has a worker know of a member's function while that runs, and keep a record of it.

    Parameters
    ----------
    key
        Of the member's task.
    members, rank
        Which member has what, and which of them this is.
    dtype
        Of what it makes.
    progress
        How far it is.
    context
        Of the worker; None where nobody asks.
    """

    def __init__(
        self,
        key: Key,
        members: Members,
        rank: int,
        dtype: DType,
        progress: Progress,
        context: TaskContext | None,
    ) -> None:
        self._key, self._members, self._rank, self._dtype = key, members, rank, dtype
        self._progress, self._context = progress, context
        self._links: Links | None = None
        self._workers: Sequence[str] = ()
        self._attempt = 1
        self._nbytes = 0
        #: Why the function, or the attempt, has ended early.
        self.error = ""

    def of_gang(self, links: Links, workers: Sequence[str], attempt: int) -> Watch:
        """Take the links to other members, and their workers, by rank."""
        self._links, self._workers, self._attempt = links, workers, attempt
        return self

    def __enter__(self) -> Watch:
        self._start_s = time.time()
        if self._context is not None:
            self._context.running[self._key] = self._running
        return self

    def made(self, blocks: Sequence[Sequence[Any]]) -> None:
        """Note what the member has made."""
        self._nbytes = sum(block.nbytes for each in blocks for block in each)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._context is None:
            return
        try:
            error = repr(exc) if exc is not None else self.error
            self._context.record(self._record(error=error[:REASON_CHARS]))
        finally:
            self._context.running.pop(self._key, None)

    def _running(self) -> Record:
        return self._record(wanted_bytes=0)

    def _record(self, **more: Any) -> Record:
        """Return what is known now. Any thread may ask."""
        members, progress = self._members, self._progress
        is_made = not more.get("error")
        assert self._context is not None
        return Record(
            key=self._key,
            start_s=self._start_s,
            stop_s=time.time(),
            stages=self._stages(),
            worker=self._context.address,
            shape=members.shape(self._rank) if is_made else (),
            dtype=str(self._dtype) if is_made else "",
            nbytes=self._nbytes if is_made else 0,
            array_shape=tuple(map(sum, members.chunks)),
            blocks=members.grid,
            axes=tuple(range(len(members.grid))),
            step=progress.step,
            steps=progress.steps,
            first_step=progress.first,
            attempt=self._attempt,
            **more,
        )

    def _stages(self) -> tuple[Stage, ...]:
        received = sorted(self._links.received) if self._links is not None else []
        return tuple(Stage(self._workers[r], LINK, n, waited_s) for r, n, waited_s in received)
