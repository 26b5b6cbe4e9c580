"""Zarr stores that ranks of `iterate` write while they run: frames, and checkpoints in files.

All ranks write their own local blocks, whole chunks of the store. Rank 0 creates arrays before, and
after all ranks it records in the store that a frame or a checkpoint is complete::

    frames.zarr/            checkpoints/
      zarr.json  frames: 3    step-000000000400/  u  v
      u  (frame, y, x)        step-000000000400.complete
      v  (frame, y, x)        step-000000000600/  u  v           without `.complete`: not used
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dask_p2p.errors import FileError, InputError
from dask_p2p.geometry import box_slices
from dask_p2p.ops.zarr_arrays import CONFIG, zarr_format
from dask_p2p.sections.api.context import Context
from dask_p2p.sections.gang.checkpoints import Period
from dask_p2p.sections.iterate.local_fields import LocalField, LocalFields
from dask_p2p.sections.iterate.scalars import Scalars
from dask_p2p.sections.iterate.series import Series
from dask_p2p.sections.iterate.stores import Checkpoint, Save, StoreSpecs

_COMPLETE = ".complete"  # end of the name of an empty file: all ranks have written the checkpoint
_STEP_DIGITS = 12


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
    ) -> None:
        self._specs, self._ctx, self._local = specs, ctx, local
        self._scalars, self._series, self._steps = scalars, series, steps
        # Groups of frames, and whether ranks share their chunks and write in turn.
        self._groups: list[tuple[Any, bool]] = []
        checkpoint = specs.checkpoint
        self._period = Period(None if checkpoint is None else checkpoint.every)

    def begin(self, first: int) -> int:
        """Open all stores, and load a checkpoint newer than a step; return the first step."""
        checkpoint = self._specs.checkpoint
        if checkpoint is not None:
            first = self._resumed(Path(checkpoint.path), first)
        for save in self._specs.saves:
            path = Path(save.path)
            self._together(path, partial(self._open, path, save, first))
            group = self._group(path)
            self._groups.append((group, self._shares_chunks(group, save)))
        return first

    def is_due(self, step: int) -> bool:
        """Return whether frames, or checkpoints of a number of steps, are due after a step."""
        checkpoint = self._specs.checkpoint
        every = None if checkpoint is None else checkpoint.every
        is_state = isinstance(every, int) and step % every == 0
        return is_state or any(step % save.every == 0 for save in self._specs.saves)

    def write(self, step: int, is_last: bool = False) -> None:
        """Write the frames and the checkpoint that are due after a step.

        The run ends by `max_time` if it `is_last`: then a checkpoint is due.
        """
        for save, (group, in_turn) in zip(self._specs.saves, self._groups, strict=True):
            if step % save.every == 0:
                self._write_frame(save, group, in_turn, step)
        checkpoint = self._specs.checkpoint
        if checkpoint is None:
            return
        if self._ctx.has_ended(self._period, step) or is_last:
            self._write_checkpoint(checkpoint, step)

    def _together(self, path: Path, work: Callable[[], None]) -> None:
        """Let rank 0 do some work, and all others wait for it."""
        if self._ctx.rank == 0:
            with _explained(path):
                work()
        self._ctx.barrier()

    # --- frames

    def _open(self, path: Path, save: Save, first: int) -> None:
        """Create the group of frames, or make it ready for frames after a first step."""
        import zarr

        frames, names = self._steps // save.every, save.fields or ()
        shapes = {name: self._shape(name) for name in names}
        program = {"format": "dask_p2p frames 1", "every": save.every, "arrays": _plain(shapes)}
        group = _opened(path) if _has_files(path) else None
        if group is None or not (group.attrs or [*group.array_keys()]):  # of a run that ended here
            attributes = {"program": program, "frames": 0, "steps": 0}
            version = zarr_format(dtype for _, dtype in shapes.values())
            options = {"zarr_format": version, "attributes": attributes, "overwrite": True}
            group = zarr.create_group(path, **options)
        elif group.attrs.get("program") != program:
            raise InputError(
                f"expected a new folder, or frames of the same fields and steps, at {path}, got "
                f"{_difference(group.attrs.get('program'), program)}. Give another path, or remove "
                f"the folder."
            )
        done = min(first // save.every, int(group.attrs["frames"]))
        if done < first // save.every:
            raise InputError(
                f"expected {first // save.every} frames at {path}, as the run resumes at step "
                f"{first}, got {done}. Give the folder of the earlier run, or another checkpoint."
            )
        missing = {name: each for name, each in shapes.items() if name not in group}
        self._create(group, missing, frames)
        for name in shapes:
            if group[name].shape[0] < frames:
                group[name].resize((frames, *group[name].shape[1:]))
        group.attrs.update({"frames": done, "steps": done * save.every})

    def _shares_chunks(self, group: Any, save: Save) -> bool:
        """Return whether two ranks have parts of one chunk: an earlier run had other chunks."""
        fields = [self._local.fields.get(name) for name in save.fields or ()]
        is_shared = any(
            start % chunk or (stop % chunk and stop != length)
            for field in fields
            if field is not None
            for (start, stop), length, chunk in zip(
                field.box, field.shape, group[field.spec.name].chunks[1:], strict=True
            )
        )
        return bool(self._ctx.allreduce(int(is_shared), "max"))

    def _write_frame(self, save: Save, group: Any, in_turn: bool, step: int) -> None:
        number = step // save.every - 1
        for rank in range(self._ctx.size if in_turn else 1):
            if not in_turn or rank == self._ctx.rank:
                self._write_own(save, group, number)
            self._ctx.barrier()
        attributes = {"frames": number + 1, "steps": step}
        self._together(Path(save.path), lambda: group.attrs.update(attributes))

    def _write_own(self, save: Save, group: Any, number: int) -> None:
        """Write this rank's part of a frame."""
        for name in save.fields or ():
            with _explained(Path(save.path)):
                if name not in self._scalars.values:
                    block = self._ctx.device.to_host(self._local.fields[name].newest.inner)
                    group[name][(number, *box_slices(self._local.fields[name].box))] = block
                elif self._ctx.rank == 0:
                    group[name][number] = self._scalars.values[name]

    def _create(self, group: Any, shapes: Mapping[str, Any], frames: int | None = None) -> None:
        """Create arrays in a group, with an axis of frames if their number is given."""
        own = tuple(size for (size,) in self._specs.chunks)
        along = () if frames is None else (frames,)
        for name, (shape, dtype) in shapes.items():
            chunks = (*(1 for _ in along), *own) if shape else along
            whole = (*along, *shape)
            group.create_array(name, shape=whole, dtype=dtype, chunks=chunks, config=CONFIG)

    def _shape(self, name: str) -> tuple[tuple[int, ...], Any]:
        """Return the shape and dtype of a field."""
        if name in self._scalars.values:
            return (), self._scalars.values[name].dtype
        field = self._local.fields[name]
        return field.shape, field.spec.dtype

    def _group(self, path: Path) -> Any:
        """Return a group that rank 0 has made; all ranks must see it."""
        with _explained(path):
            group = _opened(path) if path.exists() else None
        seen = self._ctx.allreduce(int(group is not None), "min")
        if not seen:
            raise FileError(
                f"expected a folder that all workers see, got {path}, which some do not. Give a "
                f"path of a shared file system."
            )
        return group

    # --- checkpoints

    def _levels(self) -> Iterator[tuple[str, Any, LocalField]]:
        """Yield the name of each array of a checkpoint, its local block, and its field."""
        for name, field in self._local.fields.items():
            for number, level in enumerate(field.levels if not field.spec.is_constant else ()):
                yield f"{name}.{number}" if field.spec.is_list else name, level.inner, field

    def _shapes(self) -> dict[str, Any]:
        """Return the shape and dtype of each array of a checkpoint."""
        found = {name: (field.shape, field.spec.dtype) for name, _, field in self._levels()}
        return found | {name: self._shape(name) for name in self._scalars.values}

    def _program(self) -> dict[str, Any]:
        return {"format": "dask_p2p checkpoint 1", "arrays": _plain(self._shapes())}

    def _resumed(self, path: Path, first: int) -> int:
        """Load the newest complete checkpoint if it is newer; return the first step."""
        found = []

        def look() -> None:
            path.mkdir(parents=True, exist_ok=True)
            found.extend(_complete(path))
            for folder in path.glob("step-*[0-9]"):  # of runs that have ended in a write
                if not _marker(folder).exists():
                    shutil.rmtree(folder, ignore_errors=True)
            checkpoint = self._specs.checkpoint
            assert checkpoint is not None
            if found and not checkpoint.resume and not first:
                raise InputError(
                    f"expected a folder without checkpoints because of resume=False, got {path} "
                    f"with {len(found)}. Give another path, or resume=True."
                )

        self._together(path, look)
        newest = int(self._ctx.broadcast(max(found, default=0)))
        if newest > self._steps:
            raise InputError(
                f"expected at least {newest} steps, as the checkpoint at {path} has, got "
                f"{self._steps}. Give more steps, or another path."
            )
        if newest <= first:
            return first
        group = self._group(_folder(path, newest))
        program, known = group.attrs["program"], self._program()
        if program != known:
            raise InputError(
                f"expected a checkpoint of the same fields at {path}, got "
                f"{_difference(program, known)}. Give another path, or the same fields."
            )
        for name, block, field in self._levels():
            with _explained(path):
                self._ctx.device.copy_from_host(block, group[name][box_slices(field.box)])
        self._scalars.update({name: group[name][()] for name in self._scalars.values})
        self._series.resume({name: np.asarray(v) for name, v in _series_of(group)}, newest)
        return newest

    def _write_checkpoint(self, checkpoint: Checkpoint, step: int) -> None:
        path, shapes = Path(checkpoint.path), self._shapes()
        folder = _folder(path, step)
        self._series.combine()

        def create() -> None:
            import zarr

            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that has ended
            version = zarr_format(dtype for _, dtype in shapes.values())
            group = zarr.create_group(folder, zarr_format=version)
            group.attrs.update({"program": self._program(), "step": step})
            self._create(group, shapes)
            for name, value in self._scalars.values.items():
                group[name][()] = value
            for name, values in self._series.values.items():
                group.create_array(f"series.{name}", data=values)

        def complete() -> None:
            _marker(folder).touch()
            for old in sorted(_complete(path))[: -checkpoint.keep]:
                _marker(_folder(path, old)).unlink()
                shutil.rmtree(_folder(path, old), ignore_errors=True)

        self._together(path, create)
        group = self._group(folder)
        for name, block, field in self._levels():
            with _explained(path):
                group[name][box_slices(field.box)] = self._ctx.device.to_host(block)
        self._ctx.barrier()
        self._together(path, complete)


def _folder(path: Path, step: int) -> Path:
    return path / f"step-{step:0{_STEP_DIGITS}}"


def _marker(folder: Path) -> Path:
    """Return the file that exists as soon as a checkpoint is complete."""
    return folder.with_name(folder.name + _COMPLETE)


def _complete(path: Path) -> list[int]:
    """Return the steps of all complete checkpoints in a folder."""
    names = (each.name for each in path.glob(f"step-*{_COMPLETE}"))
    return [int(name.removeprefix("step-").removesuffix(_COMPLETE)) for name in names]


def _series_of(group: Any) -> Iterator[tuple[str, Any]]:
    for name, array in group.arrays():
        if name.startswith("series."):
            yield name.removeprefix("series."), array[...]


def _has_files(path: Path) -> bool:
    """Return whether a folder has any files, apart from those that a killed process has left."""
    return path.exists() and any(not each.name.endswith(".partial") for each in path.iterdir())


def _opened(path: Path) -> Any:
    import zarr

    found = zarr.open(path, mode="r+")
    if not isinstance(found, zarr.Group):
        raise InputError(f"expected a Zarr group at {path}, got an array. Give another path.")
    return found


def _plain(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return shapes and dtypes as JSON has them."""
    return {name: [list(shape), np.dtype(dtype).str] for name, (shape, dtype) in shapes.items()}


def _difference(found: Any, wanted: Mapping[str, Any]) -> str:
    if not isinstance(found, Mapping):
        return "files of another program"
    names = [name for name in wanted if found.get(name) != wanted[name]]
    return ", ".join(f"{name} {found.get(name)} in place of {wanted[name]}" for name in names)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the store in errors of the file system."""
    try:
        yield
    except OSError as exc:
        if isinstance(exc, FileError):
            raise
        raise FileError(
            f"expected a folder that can be written at {path}, got {exc}. Make room, or give "
            f"another path."
        ) from exc
