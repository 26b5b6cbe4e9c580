"""Checkpoints in files: all ranks write their local blocks, and rank 0 records the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dask_p2p.geometry import box_slices
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.gang.checkpoints import Period
from dask_p2p.sections.iterate.local_fields import LocalField, LocalFields
from dask_p2p.sections.iterate.output.checkpoint_folder import CheckpointFolder
from dask_p2p.sections.iterate.output.folders import Folder, explained
from dask_p2p.sections.iterate.output.groups import (
    create_arrays,
    created,
    plain,
    seen_by_all,
    together,
)
from dask_p2p.sections.iterate.output.series import Series
from dask_p2p.sections.iterate.output.stores import Checkpoint
from dask_p2p.sections.iterate.scalars import Scalars


class CheckpointFiles:
    """The checkpoints of one rank in files."""

    def __init__(
        self,
        spec: Checkpoint,
        chunks: tuple[int, ...],  # of the arrays
        ctx: Context,
        local: LocalFields,
        scalars: Scalars,
        series: Series,
    ) -> None:
        self._spec, self._chunks, self._ctx = spec, chunks, ctx
        self._local, self._scalars, self._series = local, scalars, series
        self._folder = CheckpointFolder(spec, ctx)
        self._period = Period(spec.every)

    @property
    def every(self) -> int | str:
        """The interval: a number of steps, or a time."""
        return self._spec.every

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step: the same on all ranks."""
        return self._ctx.has_ended(self._period, step)

    def _levels(self) -> Iterator[tuple[str, Any, LocalField]]:
        """Yield the name of each array, its local block, and its field."""
        for name, field in self._local.fields.items():
            for number, level in enumerate(field.levels if not field.spec.is_constant else ()):
                yield f"{name}.{number}" if field.spec.is_list else name, level.inner, field

    def _shapes(self) -> dict[str, Any]:
        """Return the shape and dtype of each array."""
        found = {name: (field.shape, field.spec.dtype) for name, _, field in self._levels()}
        return found | {name: ((), of.dtype) for name, of in self._scalars.values.items()}

    def _program(self) -> dict[str, Any]:
        return {"format": "dask_p2p checkpoint 1", "arrays": plain(self._shapes())}

    def resumed(self, first: int, steps: int) -> int:
        """Load the newest complete checkpoint if it is newer than a step; return the first step.

        Raises `InputError` if it has more steps than the run, or other fields.
        """
        newest, folder = self._folder.newest(first, steps), self._folder
        if newest <= first:
            return first
        group = folder.opened(newest, self._program())
        for name, block, field in self._levels():
            with explained(folder.of(newest)):
                self._ctx.device.copy_from_host(block, group[name][box_slices(field.box)])
        self._scalars.update({name: group[name][()] for name in self._scalars.values})
        self._series.resume({name: np.asarray(v) for name, v in _series_of(group)}, newest)
        return newest

    def write(self, step: int, before_end: Callable[[], None]) -> None:
        """Write a checkpoint; `before_end` is called on all ranks before it is complete."""
        folder = self._folder.of(step)
        self._series.combine()
        together(self._ctx, folder, lambda: self._create(folder, step))
        group = seen_by_all(self._ctx, folder)
        for name, block, field in self._levels():
            with explained(folder):
                group[name][box_slices(field.box)] = self._ctx.device.to_host(block)
        before_end()
        self._ctx.barrier()
        together(self._ctx, folder, lambda: self._folder.complete(step))

    def _create(self, folder: Folder, step: int) -> None:
        folder.remove()  # of an attempt that has ended
        shapes = self._shapes()
        group = created(folder, shapes, {"program": self._program(), "step": step})
        create_arrays(group, shapes, self._chunks)
        for name, value in self._scalars.values.items():
            group[name][()] = value
        for name, values in self._series.values.items():
            group.create_array(f"series.{name}", data=values)


def _series_of(group: Any) -> Iterator[tuple[str, Any]]:
    for name, array in group.arrays():
        if name.startswith("series."):
            yield name.removeprefix("series."), array[...]
