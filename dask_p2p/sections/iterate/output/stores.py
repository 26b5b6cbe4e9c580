"""The arguments `save` and `checkpoint` of `iterate` and `Context.steps`, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dask_p2p.errors import InputError, needs
from dask_p2p.geometry import Chunks
from dask_p2p.inputs import checked_count, checked_flag
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.gang.checkpoints import checked_period
from dask_p2p.sections.iterate.fields import Scalars
from dask_p2p.sections.iterate.local_fields import LocalFields
from dask_p2p.sections.iterate.output.files import CheckpointFiles, StateFiles
from dask_p2p.sections.iterate.output.frames import BackgroundFrames, Frames, StateFrames, Values
from dask_p2p.sections.iterate.output.groups import absolute
from dask_p2p.sections.iterate.output.series import Series
from dask_p2p.sections.iterate.output.specs import (
    NO_STORES,
    CheckpointArguments,
    SaveArguments,
    StoreSpecs,
    checked_frames,
    store_chunks,
)


@dataclass(frozen=True)
class Save(SaveArguments):
    """Frames of fields, which `iterate` or `Context.steps` writes to a Zarr group.

    The group has an array (frame, ...) for each field, for all frames of the run. When the run
    ends, the arrays end with the last frame. Their coordinates are `frame` and `step`, and numbers
    `t` and `time` of the program. Its attribute `frames` is the number of frames that all ranks
    have written, and `steps` the step of the last one. Each chunk has a checksum, which readers
    compare; a missing one is NaN, or 0 for integers. A thread of each rank writes a copy of its
    local blocks while steps go on. The next frame waits for the end of that write. A run that
    begins to write the same group ends an earlier one that is under way.

    Parameters
    ----------
    path : str or Path
        Folder of the group, which all workers can write: a path, or a URL that fsspec opens.
    every : int
        Number of steps between frames.
    fields : sequence of str, optional
        Names of the fields, by default all. The newest level of a field is saved.
    region : slice or tuple of slice, optional
        Part of the arrays that is saved, such as ``numpy.s_[::4, :100]``. By default all.
    compute : mapping, optional
        Functions of further fields by name, ``{"speed": f}``. The parameters of a function are
        names of fields, constants and keywords, and `at`, as for the function of a step. Fields
        have their halos. It returns a local block of the first field's shape, with or without
        halo. It is also called once before the first step, for the dtype. In the first frames it is
        called for halves of a local block, too. A warning names functions whose values depend on
        the number of ranks.
    dims : sequence of str, optional
        Names of the axes of the fields, as `xarray.open_zarr` reads them. By default "dim_0",
        "dim_1" and so on. The axis of frames is "frame".
    coords : mapping, optional
        Coordinates: one-dimensional arrays of numbers by the name of an axis.
    """

    def of_state(self, ctx: Any, state: Any, steps: int | None) -> Any:
        """Return the frames of a state, for `Context.steps`.

        Raises `InputError` for other arguments, and `MissingPackageError` without Zarr.
        """
        _check_for_state(self.path)
        return StateFrames(self, ctx, state, steps)


@dataclass(frozen=True)
class Checkpoint(CheckpointArguments):
    """Checkpoints in files, which `iterate` or `Context.steps` writes, and resumes from.

    A run begins at the newest complete checkpoint, with any number of ranks and any chunks. Then it
    does not use the initial values that it gets. A warning names initial values, constants,
    keywords, boundaries, depths and functions that differ from those of the first run. A
    fingerprint shows damaged checkpoints: then a warning names the newest one, and the run begins
    at an older one. Checkpoints that another run writes to the same folder at the same time end the
    run that began first.

    Parameters
    ----------
    path : str or Path
        Folder of the checkpoints, which all workers can write: a path, or a URL that fsspec opens.
    every : int or str, optional
        Number of steps, or time, between checkpoints; by default "10 minutes".
    keep : int, optional
        Number of complete checkpoints that are kept, by default 2. A run removes others when it
        begins, and after each new one.
    resume : bool, optional
        If False, a folder that has checkpoints is refused.
    """

    def of_state(self, ctx: Any, state: Any, steps: int | None) -> Any:
        """Return the files of a state, for `Context.steps`.

        Raises `InputError` for other arguments, and `MissingPackageError` without Zarr.
        """
        _check_for_state(self.path)
        return StateFiles(_checked_checkpoint(self), ctx, state)


def _check_for_state(path: Any) -> None:
    """Refuse a path that workers would look up in current folders of their own."""
    with needs("zarr", "zarr"):
        import zarr  # noqa: F401
    if "://" not in str(path) and not Path(path).is_absolute():
        raise InputError(
            f"expected an absolute path, as workers have other current folders, got "
            f"{str(path)!r}. Give str(pathlib.Path(...).absolute())."
        )


def checked_stores(
    save: Any,
    checkpoint: Any,
    names: Sequence[str],  # of the fields
    value_names: Collection[str],  # names of all values that functions can read
    chunks: Chunks,  # of the first field
) -> StoreSpecs:
    """Return the stores of a run with absolute paths.

    Raises `InputError` for anything else than stores of the fields, and `MissingPackageError`
    without Zarr, or without a package for a URL.
    """
    saves = list(save) if isinstance(save, Iterable) else [save]
    if not saves and checkpoint is None:
        return NO_STORES
    with needs("zarr", "zarr"):
        import zarr  # noqa: F401
    for store in saves:
        if not isinstance(store, Save):
            raise InputError(
                f"save: expected Save objects, got {type(store).__name__}. Give "
                f"[dask_p2p.Save('frames.zarr', every=100)]."
            )
    frames = tuple(checked_frames(store, names, value_names, chunks) for store in saves)
    if checkpoint is not None:
        checkpoint = _checked_checkpoint(checkpoint)
    paths = [store.path for store in (*frames, *([checkpoint] if checkpoint else ()))]
    if len({*paths}) < len(paths):
        raise InputError("expected another path for each store, got one twice. Rename it.")
    return StoreSpecs(frames, checkpoint, store_chunks(chunks) if checkpoint else ())


def _checked_checkpoint(checkpoint: Any) -> Checkpoint:
    if not isinstance(checkpoint, Checkpoint):
        raise InputError(
            f"checkpoint: expected a Checkpoint object, got {type(checkpoint).__name__}. Give "
            f"dask_p2p.Checkpoint('states')."
        )
    return Checkpoint(
        absolute(checkpoint.path),
        checked_period(checkpoint.every) or "10 minutes",
        checked_count("checkpoints", keep=checkpoint.keep),
        checked_flag("resume", checkpoint.resume),
    )


# Zarr stores that ranks of `iterate` write while they run: frames, and checkpoints in files.
#
# All ranks write their own local blocks, whole chunks of the store. Rank 0 creates arrays before,
# and after all ranks it records in the store that a frame or a checkpoint is complete::
#
#     frames.zarr/            checkpoints/
#       zarr.json  frames: 3    step-000000000400/  u  v
#       u  (frame, y, x)        step-000000000400.complete
#       v  (frame, y, x)        step-000000000600/  u  v
#       step  frame             step-000000000600.incomplete       not used
#
# A thread writes a copy of a frame while the next steps are made. The next frame that is due waits
# for all ranks, and then the thread of rank 0 records the previous one::
#
#     steps    | 1 .. 50 |copy| 51 .. 100  |wait for all ranks, copy| 101 ..
#     thread                  | frame 0 |                           | record 0, frame 1 |
#
# Ranks that share chunks write in turn, without a thread.

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
        self._frames = [Frames(spec, ctx, local, scalars, steps) for spec in specs.frames]
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
        return is_state or bool(self._written.frames_due(step))

    def computes(self, step: int) -> bool:
        """Return whether fields are computed for the frames after a step."""
        return self._computes(self._written.frames_due(step))

    @staticmethod
    def _computes(frames: Sequence[Frames]) -> bool:
        return any(frames_of_store.spec.computed for frames_of_store in frames)

    def write(self, step: int, current: Current, is_last: bool = False) -> None:
        """Write the frames and the checkpoint that are due after a step.

        The run ends by `max_time` if it `is_last`: then a checkpoint is due.
        """
        self._written.check()
        self._written.write(
            step, lambda frames: current(self._names) if self._computes(frames) else None
        )
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
