"""A folder of checkpoints in files: which are complete, and which are too old."""

from __future__ import annotations

from typing import Any

from dask_p2p.errors import InputError
from dask_p2p.sections.iterate.output.folders import Folder
from dask_p2p.sections.iterate.output.groups import difference, seen_by_all, together
from dask_p2p.sections.iterate.output.stores import Checkpoint

_STEP, _COMPLETE = "step-", ".complete"  # an empty file: all ranks have written the checkpoint
_STEP_DIGITS = 12


class CheckpointFolder:
    """The folder of a `Checkpoint`, for one rank."""

    def __init__(self, spec: Checkpoint, ctx: Any) -> None:
        self._spec, self._ctx = spec, ctx
        self._folder = Folder(str(spec.path))

    def __str__(self) -> str:
        return str(self._folder)

    def newest(self, first: int, steps: int | None) -> int:
        """Return the step of the newest complete checkpoint, or 0; remove incomplete ones.

        Raises `InputError` if it has more steps than the run. `first` is a step that the run
        resumes from otherwise.
        """
        found = list[int]()
        together(self._ctx, self._folder, lambda: found.extend(self._found(first)))
        newest = int(self._ctx.broadcast(max(found, default=0)))
        if steps is not None and newest > steps:
            raise InputError(
                f"expected at least {newest} steps, as the checkpoint at {self} has, got "
                f"{steps}. Give more steps, or another path."
            )
        return newest

    def opened(self, step: int, program: dict[str, Any]) -> Any:
        """Return the group of a checkpoint. Raises `InputError` if another program wrote it."""
        group = seen_by_all(self._ctx, self.of(step))
        found = group.attrs["program"]
        if found != program:
            raise InputError(
                f"expected a checkpoint of the same fields at {self}, got "
                f"{difference(found, program)}. Give another path, or the same fields."
            )
        return group

    def _found(self, first: int) -> list[int]:
        """Return the steps of complete checkpoints; remove others. On rank 0."""
        folder = self._folder
        folder.make()
        found = self._complete()
        for name in folder.names():  # of runs that have ended in a write
            if name.startswith(_STEP) and name[-1].isdigit() and _step_of(name) not in found:
                folder.child(name).remove()
        if found and not self._spec.resume and not first:
            raise InputError(
                f"expected a folder without checkpoints because of resume=False, got {folder} "
                f"with {len(found)}. Give another path, or resume=True."
            )
        return found

    def complete(self, step: int) -> None:
        """Record that all ranks have written a checkpoint; remove old ones. On rank 0."""
        self._marker(step).touch()
        for old in sorted(self._complete())[: -self._spec.keep]:
            self._marker(old).remove()
            self.of(old).remove()

    def of(self, step: int) -> Folder:
        """Return the folder of one checkpoint."""
        return self._folder.child(f"{_STEP}{step:0{_STEP_DIGITS}}")

    def _marker(self, step: int) -> Folder:
        """Return the file that exists as soon as a checkpoint is complete."""
        return self._folder.child(f"{_STEP}{step:0{_STEP_DIGITS}}{_COMPLETE}")

    def _complete(self) -> list[int]:
        """Return the steps of all complete checkpoints."""
        names = self._folder.names()
        marks = [name for name in names if name.startswith(_STEP) and name.endswith(_COMPLETE)]
        return [_step_of(name) for name in marks]


def _step_of(name: str) -> int:
    return int(name.removeprefix(_STEP).removesuffix(_COMPLETE))
