"""A folder of checkpoints in files: which are complete, and which are too old.

Rank 0 creates the arrays of a checkpoint, all ranks write their parts, and then rank 0 records that
the checkpoint is complete.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.gang.checkpoints import Period
from dask_p2p.sections.iterate.output.folders import Folder, explained
from dask_p2p.sections.iterate.output.groups import (
    another_run,
    difference,
    is_seen_by_all,
    not_seen,
    seen_by_all,
    together,
)

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.output.stores import Checkpoint

_COMPLETE = ".complete"  # end of the name of an empty file: all ranks have written the checkpoint
# Other files and folders stay as they are: they may be a user's, such as a folder run-1.
_STEP_NAME = re.compile(r"step-(\d{12})")
_RUN_NAME = re.compile(r"run-[0-9a-f]{16}")  # of an empty file: the newest run with this folder


class CheckpointFolder(ABC):
    """The checkpoints of one rank in the folder of a `Checkpoint`."""

    def __init__(
        self,
        spec: Checkpoint,
        ctx: Context,
        fingerprints: Mapping[str, np.uint64],  # of this rank's parts of the initial values
        settings: Mapping[str, str] = {},  # of the run, by name
    ) -> None:
        self.ctx, self._spec = ctx, spec
        self._folder, self._period = Folder(str(spec.path)), Period(spec.every)
        self._fingerprints = fingerprints
        #: Settings, and fingerprints of the whole initial values, as texts.
        self._initial = {**settings}
        self._run: Folder | None = None  # the file of this run

    def __str__(self) -> str:
        return str(self._folder)

    @property
    def every(self) -> int | str:
        """The interval: a number of steps, or a time."""
        return self._spec.every

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step: the same on all ranks."""
        return self.ctx.has_ended(self._period, step)

    def resumed(self, first: int, steps: int | None) -> int:
        """Load the newest complete checkpoint if it is newer than a step; return the first step.

        Raises `InputError` if it has more steps than the run, or another program wrote it, and
        `FileError` if some ranks do not see the folder.
        """
        newest = self._newest(first, steps)
        own = np.array([*self._fingerprints.values()], np.uint64)
        sums = self.ctx.allreduce(own) if own.size else own
        self._initial |= zip(self._fingerprints, map(hex, sums.tolist()), strict=True)
        if newest <= first:
            return first
        group = self._opened(newest)
        initial = group.attrs.get("initial", self._initial)
        names = [name for name, own in self._initial.items() if initial.get(name, own) != own]
        if names and not first:
            self._warn(
                f"checkpoint: the run resumes at step {newest} of {self}. It differs from the "
                f"first run there in {', '.join(names)}: the steps before are those of the first "
                f"run. Give another path to begin at step 0."
            )
        self._initial = initial
        with explained(self._of(newest)):
            self._load(group)
        return newest

    def write(self, step: int, flush: Callable[[], None]) -> None:
        """Write a checkpoint; `flush` completes all frames before it is complete."""
        ctx, folder = self.ctx, self._of(step)

        def create() -> None:
            self._check_run()
            folder.remove()  # of an attempt that has ended
            self._create(folder, step)

        self._prepare()
        together(ctx, folder, create)
        group = seen_by_all(ctx, folder)
        with explained(folder):
            self._fill(group)
        flush()
        ctx.barrier()
        together(ctx, folder, lambda: self._complete(step))

    def flush(self) -> None:  # noqa: B027
        """Return immediately: checkpoints are complete after `write`."""

    def close(self) -> None:
        """Release the folder for other runs."""
        if self.ctx.rank == 0 and self._run is not None:
            self._run.remove()

    @abstractmethod
    def _program(self) -> dict[str, Any]:
        """Return a description of the values, which that of a later run must equal."""

    @abstractmethod
    def _load(self, group: Any) -> None:
        """Read this rank's part of a checkpoint."""

    @abstractmethod
    def _prepare(self) -> None:
        """Gather the values to write. A collective call of all ranks."""

    @abstractmethod
    def _create(self, folder: Folder, step: int) -> None:
        """Create the group of a checkpoint, with its arrays and numbers. On rank 0."""

    @abstractmethod
    def _fill(self, group: Any) -> None:
        """Write this rank's part of a checkpoint."""

    def _newest(self, first: int, steps: int | None) -> int:
        """Return the step of the newest complete checkpoint, or 0; remove incomplete ones."""
        found = list[int]()
        number = int(self.ctx.bcast(secrets.randbits(62) if self.ctx.rank == 0 else None))
        self._run = run = self._folder.child(f"run-{number:016x}")
        together(self.ctx, self._folder, lambda: found.extend(self._found(first, run)))
        if not is_seen_by_all(self.ctx, run):
            together(self.ctx, self._folder, self._check_run)
            raise not_seen(self._folder)
        newest = int(self.ctx.broadcast(max(found, default=0)))
        if steps is not None and newest > steps:
            raise InputError(
                f"expected at least {newest} steps, as the checkpoint at {self} has, got "
                f"{steps}. Give more steps, or another path."
            )
        return newest

    def _opened(self, step: int) -> Any:
        """Return the group of a checkpoint. Raises `InputError` if another program wrote it."""
        group = seen_by_all(self.ctx, self._of(step))
        found, program = group.attrs["program"], self._program()
        if found != program:
            raise InputError(
                f"expected a checkpoint of the same fields at {self}, got "
                f"{difference(found, program)}. Give another path, or the same fields."
            )
        return group

    def _found(self, first: int, run: Folder) -> list[int]:
        """Return the steps of complete checkpoints; remove others, and other runs. On rank 0."""
        folder = self._folder
        folder.make()
        run.touch()  # first, so that one of two runs that begin at the same time finds the other
        found = self._steps()
        for name in folder.names():  # of runs that have ended in a write
            step, is_run = _STEP_NAME.fullmatch(name), _RUN_NAME.fullmatch(name)
            if (is_run and name != run.name) or (step and int(step[1]) not in found):
                folder.child(name).remove()
        if found and not self._spec.resume and not first:
            raise InputError(
                f"expected a folder without checkpoints because of resume=False, got {folder} "
                f"with {len(found)}. Give another path, or resume=True."
            )
        return found

    def _complete(self, step: int) -> None:
        """Record that all ranks have written a checkpoint; remove old ones. On rank 0."""
        self._check_run()
        self._marker(step).touch()
        for old in sorted(self._steps())[: -self._spec.keep]:
            self._marker(old).remove()
            self._of(old).remove()

    def _check_run(self) -> None:
        """Raise `FileError` if another run has begun to use the folder. On rank 0."""
        if self._run is None or not self._run.exists():
            raise another_run("checkpoints", self._folder)

    def _warn(self, text: str) -> None:
        """Warn once, in the client and in the worker of rank 0."""
        from distributed import warn

        if self.ctx.rank == 0:
            warn(text, P2PWarning)

    def _attributes(self, step: int) -> dict[str, Any]:
        """Return the attributes of the group of a checkpoint."""
        return {"program": self._program(), "step": step, "initial": self._initial}

    def _of(self, step: int) -> Folder:
        """Return the folder of one checkpoint."""
        return self._folder.child(f"step-{step:012}")

    def _marker(self, step: int) -> Folder:
        """Return the file that exists as soon as a checkpoint is complete."""
        return self._folder.child(f"step-{step:012}{_COMPLETE}")

    def _steps(self) -> list[int]:
        """Return the steps of all complete checkpoints."""
        names = [name for name in self._folder.names() if name.endswith(_COMPLETE)]
        found = [_STEP_NAME.fullmatch(name.removesuffix(_COMPLETE)) for name in names]
        return [int(step[1]) for step in found if step]
