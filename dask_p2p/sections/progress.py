"""What a member tells of itself, while its function runs and after."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dask_p2p.engine.context import TaskContext
from dask_p2p.monitoring.records import REASON_CHARS, Record, Stage
from dask_p2p.plans.members import Members
from dask_p2p.sections.links import Links
from dask_p2p.types import DType, Key

#: In the place of a transport: what members send each other.
LINK = "link"


@dataclass(slots=True)
class Progress:
    """How far a function is: its own thread writes, others read."""

    step: int = 0  # steps that are done
    steps: int = 0  # of so many; 0 if that is not known
    first: int = 0  # where this attempt began


@dataclass
class Watch:
    """Has a worker know of a member's function while that runs, and keep a record of it."""

    key: Key  # of the member's task
    members: Members  # which member has what
    rank: int  # which of them this is
    dtype: DType  # of what it makes
    progress: Progress  # how far it is
    context: TaskContext | None  # of the worker; None where nobody asks
    links: Links | None = None  # to other members
    workers: Sequence[str] = ()  # of all members, by rank
    attempt: int = 1
    error: str = ""  # why the function, or the attempt, has ended early
    start_s: float = field(default_factory=time.time)
    nbytes: int = 0  # of what the member has made

    def made(self, blocks: Sequence[Sequence[Any]]) -> None:
        """Note what the member has made."""
        self.nbytes = sum(block.nbytes for each in blocks for block in each)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return the context in which the function runs."""
        if self.context is None:
            yield
            return
        self.context.running[self.key] = partial(self._record, wanted_bytes=0)
        try:
            yield
        except BaseException as exc:
            self.error = repr(exc)
            raise
        finally:
            try:
                self.context.record(self._record(error=self.error[:REASON_CHARS]))
            finally:
                self.context.running.pop(self.key, None)

    def _record(self, **more: Any) -> Record:
        """Return what is known now. Any thread may ask."""
        members, progress = self.members, self.progress
        is_made = not more.get("error")
        assert self.context is not None
        return Record(
            key=self.key,
            start_s=self.start_s,
            stop_s=time.time(),
            stages=self._stages(),
            worker=self.context.address,
            shape=members.shape(self.rank) if is_made else (),
            dtype=str(self.dtype) if is_made else "",
            nbytes=self.nbytes if is_made else 0,
            array_shape=tuple(map(sum, members.chunks)),
            blocks=members.grid,
            axes=tuple(range(len(members.grid))),
            step=progress.step,
            steps=progress.steps,
            first_step=progress.first,
            attempt=self.attempt,
            **more,
        )

    def _stages(self) -> tuple[Stage, ...]:
        received = sorted(self.links.received) if self.links is not None else []
        return tuple(Stage(self.workers[r], LINK, n, waited_s) for r, n, waited_s in received)
