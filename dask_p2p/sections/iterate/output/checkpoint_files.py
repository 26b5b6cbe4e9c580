"""Checkpoints in files: all ranks write their local blocks, and rank 0 records the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.geometry import box_slices
from dask_p2p.ops.zarr_arrays import CONFIG
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.iterate.local_fields import LocalField, LocalFields
from dask_p2p.sections.iterate.output.checkpoint_folder import CheckpointFolder
from dask_p2p.sections.iterate.output.fingerprints import fingerprint, fingerprint_of_same
from dask_p2p.sections.iterate.output.folders import Folder
from dask_p2p.sections.iterate.output.groups import create_arrays, created, plain, stored
from dask_p2p.sections.iterate.output.series import Series
from dask_p2p.sections.iterate.scalars import Scalars

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.output.stores import Checkpoint

_SERIES = "series."  # start of the names of the arrays of series


class CheckpointFiles(CheckpointFolder):
    """The checkpoints in files of the fields of one rank."""

    def __init__(
        self,
        spec: Checkpoint,
        chunks: tuple[int, ...],  # of the arrays
        ctx: Context,
        local: LocalFields,
        scalars: Scalars,
        series: Series,
        settings: Mapping[str, str],  # of the run, by name
    ) -> None:
        self._chunks, self._local, self._scalars, self._series = chunks, local, scalars, series
        initial = {n: fingerprint(ctx.device, part, of.box) for n, part, of in self._levels()}
        for name, value in scalars.values.items():
            initial[name] = fingerprint_of_same(ctx.device, np.asarray(value), ctx.rank)
        super().__init__(spec, ctx, initial, settings)

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

    def _load(self, group: Any) -> None:
        for name, block, field in self._levels():
            self.ctx.device.copy_from_host(block, group[name][box_slices(field.box)])
        self._scalars.update({name: group[name][()] for name in self._scalars.values})
        series = {
            name.removeprefix(_SERIES): np.asarray(array[...])
            for name, array in group.arrays()
            if name.startswith(_SERIES)
        }
        step, kinds = int(group.attrs["step"]), self._series.kinds
        found = group.attrs.get("records", {})
        names = [name for name, own in kinds.items() if found.get(name, own) != own]
        if names:
            raise InputError(
                f"record: expected records of the same steps, shape and dtype as in the checkpoint "
                f"at {self}, {found}, got {kinds}. Give {', '.join(names)} another name, or the "
                f"checkpoint another path."
            )
        if new := sorted(kinds.keys() - series.keys()):
            self._warn(
                f"record: the run resumes at step {step} of {self}, which has no values of "
                f"{', '.join(new)}. Their series have NaN, or 0 for integers, for the steps "
                f"before. Give the records in the first run."
            )
        self._series.resume(series, step)

    def _prepare(self) -> None:
        self._series.combine()

    def _fill(self, group: Any) -> None:
        for name, block, field in self._levels():
            stored(group, name)[box_slices(field.box)] = self.ctx.device.to_host(block)

    def _create(self, folder: Folder, step: int) -> None:
        shapes = self._shapes()
        attributes = self._attributes(step) | {"records": self._series.kinds}
        group = created(folder, shapes, attributes)
        create_arrays(group, shapes, self._chunks)
        for name, value in self._scalars.values.items():
            stored(group, name)[()] = value
        for name, values in self._series.values.items():
            group.create_array(f"{_SERIES}{name}", data=values, config=CONFIG)
