"""Checkpoints in files: all ranks write their local blocks, and rank 0 records the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.iterate.local_fields import LocalField, LocalFields
from dask_p2p.sections.iterate.output.checkpoint_folder import ATTRIBUTES, CheckpointFolder
from dask_p2p.sections.iterate.output.fingerprints import Parts, fingerprint, fingerprint_of_same
from dask_p2p.sections.iterate.output.folders import Folder
from dask_p2p.sections.iterate.output.groups import create_arrays, created, plain
from dask_p2p.sections.iterate.output.series import Series
from dask_p2p.sections.iterate.scalars import Scalars

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.output.specs import CheckpointArguments

_SERIES = "series."  # start of the names of the arrays of series


class CheckpointFiles(CheckpointFolder):
    """The checkpoints in files of the fields of one rank."""

    def __init__(
        self,
        spec: CheckpointArguments,
        chunks: tuple[int, ...],  # of the arrays
        ctx: Context,
        local: LocalFields,
        scalars: Scalars,
        series: Series,
        settings: Callable[[], Mapping[str, str]],  # of the run, by name
    ) -> None:
        self._chunks, self._local, self._scalars, self._series = chunks, local, scalars, series
        initial = {n: fingerprint(ctx.device, part, of.box) for n, part, of in self._levels()}
        for name, value in scalars.values.items():
            initial[name] = fingerprint_of_same(ctx.device, np.asarray(value), ctx.rank)
        for name, block, box, counts in local.constant_arrays():
            initial[name] = fingerprint(ctx.device, block, box) if counts else np.uint64(0)
        super().__init__(spec, ctx, initial, settings() if ctx.rank == 0 else {})

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
        return {"format": ATTRIBUTES["format"], "arrays": plain(self._shapes())}

    def _details(self) -> dict[str, Any]:
        return {"records": self._series.kinds}

    def _check(self, record: Mapping[str, Any]) -> None:
        saved, kinds = record["records"], self._series.kinds
        names = [name for name, kind in kinds.items() if saved.get(name, kind) != kind]
        if names:
            raise InputError(
                f"record: expected records of the same steps, shape and dtype as in the checkpoint "
                f"at {self}, {saved}, got {kinds}. Give {', '.join(names)} another name, or the "
                f"checkpoint another path."
            )

    def _load(self, group: Any, record: Mapping[str, Any]) -> np.uint64:
        parts, series = Parts(), dict[str, Any]()
        for name, block, field in self._levels():
            self.ctx.device.copy_from_host(block, parts.read(group, name, field.box))
        counts = self.ctx.rank == 0  # values that all ranks have
        for name in self._scalars.values:
            self._scalars.update({name: parts.read(group, name, counts=counts)[()]})
        for name in record["records"]:
            series[name] = parts.read(group, f"{_SERIES}{name}", counts=counts)
        self._series.resume(series, int(record["step"]))
        return parts.fingerprint

    def _report(self, step: int, record: Mapping[str, Any], damage: str, is_first: bool) -> None:
        super()._report(step, record, damage, is_first)
        if new := sorted(self._series.kinds.keys() - record["records"].keys()):
            self._warn(
                f"record: the run resumes at step {step} of {self}, which has no values of "
                f"{', '.join(new)}. Their series have NaN, or 0 for integers, for the steps "
                f"before. Give the records in the first run."
            )

    def _prepare(self) -> None:
        self._series.combine()

    def _create(self, folder: Folder) -> None:
        shapes = self._shapes()
        group = created(folder, shapes, ATTRIBUTES)
        fields = {name: shapes[name] for name, _, _ in self._levels()}
        create_arrays(group, fields, self._chunks)

    def _fill(self, group: Any) -> np.uint64:
        parts = Parts()
        for name, block, field in self._levels():
            parts.write(group, name, self.ctx.device.to_host(block), field.box)
        if self.ctx.rank == 0:
            for name, value in self._scalars.values.items():
                parts.create(group, name, np.asarray(value))
            for name, values in self._series.values.items():
                parts.create(group, f"{_SERIES}{name}", values)
        return parts.fingerprint
