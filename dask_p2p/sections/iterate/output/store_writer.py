"""Zarr stores that ranks of `iterate` write while they run: frames, and checkpoints in files.

All ranks write their own local blocks, whole chunks of the store. Rank 0 creates arrays before, and
after all ranks it records in the store that a frame or a checkpoint is complete::

    frames.zarr/            checkpoints/
      zarr.json  frames: 3    step-000000000400/  u  v
      u  (frame, y, x)        step-000000000400.complete
      v  (frame, y, x)        step-000000000600/  u  v
      step  frame             step-000000000600.incomplete       not used

A thread writes a copy of a frame while the next steps are made. The next frame that is due waits
for all ranks, and then the thread of rank 0 records the previous one::

    steps    | 1 .. 50 |copy| 51 .. 100  |wait for all ranks, copy| 101 ..
    thread                  | frame 0 |                           | record 0, frame 1 |

Ranks that share chunks write in turn, without a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from dask_p2p.sections.context.context import Context
from dask_p2p.sections.iterate.local_fields import LocalFields
from dask_p2p.sections.iterate.output.checkpoint_files import CheckpointFiles
from dask_p2p.sections.iterate.output.frames import BackgroundFrames, Frames, Values
from dask_p2p.sections.iterate.output.series import Series
from dask_p2p.sections.iterate.output.specs import StoreSpecs
from dask_p2p.sections.iterate.scalars import Scalars

#: Updates the halos of some fields after a step, and returns their values.
Current = Callable[[Collection[str]], Values]


class Stores:
    """The stores of one rank."""

    def __init__(
        self,
        specs: StoreSpecs,
        ctx: Context,
        local: LocalFields,
        scalars: Scalars,
        series: Series,
        steps: int,  # of the run
        settings: Callable[[], Mapping[str, str]],  # which checkpoints in files record
    ) -> None:
        self._steps, self._names = steps, specs.names
        self._frames = [Frames(each, ctx, local, scalars, steps) for each in specs.frames]
        self._written = BackgroundFrames(ctx, self._frames)
        self._files: CheckpointFiles | None = None
        if specs.checkpoint is not None:
            arguments = specs.checkpoint, specs.chunks, ctx, local, scalars, series, settings
            self._files = CheckpointFiles(*arguments)

    def resumed(self, first: int) -> int:
        """Load a checkpoint from files that is newer than a step; return the first step."""
        return first if self._files is None else self._files.resumed(first, self._steps)

    def open(self, first: int, current: Current) -> None:
        """Open all groups of frames before the first step."""
        values = current(self._names) if self._computes(self._frames) else None
        for frames in self._frames:
            frames.open(first, values)

    def is_due(self, step: int) -> bool:
        """Return whether frames, or checkpoints of a number of steps, are due after a step."""
        every = self._files.every if self._files is not None else None
        is_state = isinstance(every, int) and step % every == 0
        return is_state or bool(self._written.due(step))

    def computes(self, step: int) -> bool:
        """Return whether fields are computed for the frames after a step."""
        return self._computes(self._written.due(step))

    @staticmethod
    def _computes(frames: Sequence[Frames]) -> bool:
        return any(each.spec.computed for each in frames)

    def write(self, step: int, current: Current, is_last: bool = False) -> None:
        """Write the frames and the checkpoint that are due after a step.

        The run ends by `max_time` if it `is_last`: then a checkpoint is due.
        """
        self._written.check()
        self._written.write(step, lambda due: current(self._names) if self._computes(due) else None)
        if self._files is not None and (self._files.is_due(step) or is_last):
            self._files.write(step, self.flush)

    def flush(self) -> None:
        """Wait until all ranks have written all frames; rank 0 records them."""
        self._written.flush()

    def close(self) -> None:
        """End the thread, and release the folder of checkpoints."""
        self._written.close()
        if self._files is not None:
            self._files.close()
