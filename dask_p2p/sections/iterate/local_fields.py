"""The fields and constants of one rank, and the values that its functions receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dask_p2p.geometry import Box, box_shape, move_box, whole_box
from dask_p2p.sections.api.rank_body import LocalBlocks
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.grids import Grid, LocalPoints, Points
from dask_p2p.sections.exchange.boundaries import At
from dask_p2p.sections.exchange.halo import HaloArray, HaloLayout, HaloPart
from dask_p2p.sections.iterate.fields import ConstantSpec, FieldSpec
from dask_p2p.sections.iterate.functions import AT, VALUES, Binding
from dask_p2p.types import Array


class LocalField:
    """The time levels of a field with their halos, the newest first."""

    def __init__(
        self,
        spec: FieldSpec,
        levels: Sequence[HaloArray],
        grid: Grid,  # division of its arrays
        first_box: Box,  # of the local block of the first field
    ) -> None:
        self.spec, self.levels = spec, list(levels)
        self.shape, self.box = grid.shape, grid.box
        pairs = zip(box_shape(grid.box), box_shape(first_box), strict=True)
        #: By axis: elements at the end that the local block of the first field does not have.
        self._extra = [length - first_length for length, first_length in pairs]
        self.has_halo = any(map(any, spec.widest))
        self._next_level: HaloArray | None = None

    @property
    def newest(self) -> HaloArray:
        return self.levels[0]

    @property
    def layout(self) -> HaloLayout:
        return self.newest.layout

    @property
    def next_level(self) -> HaloArray:
        if self._next_level is None:
            self._next_level = HaloArray(self.layout)
        return self._next_level

    def rotate(self) -> None:
        """Make the filled memory the newest level, and reuse that of the oldest for the next."""
        filled = self._next_level
        assert filled is not None, "its memory is filled"
        self.levels, self._next_level = [filled, *self.levels[:-1]], self.levels[-1]

    def parts(self, box: Box) -> list[HaloPart]:
        """Return the part of each level for a box of the local block of the first field."""
        if any(self._extra):
            pairs = zip(box, self._extra, strict=True)
            box = tuple((start, stop + longer_by) for (start, stop), longer_by in pairs)
        of_levels = zip(self.levels, self.spec.depths, strict=True)
        return [level.part(box, depth) for level, depth in of_levels]


class StepAt(At):
    """The position of a step: parameter `at` of the functions of `iterate`."""

    def __init__(self, *position: Any, last: Mapping[str, Any]) -> None:
        super().__init__(*position)
        self._last = MappingProxyType(last)

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest records of all ranks by name; empty before the first one.

        Raises `InputError` with ``capture=True``, since all replayed steps have the same ones.
        """
        self._step("at.last")
        return self._last


class LocalFields:
    """All fields and constants of one rank."""

    def __init__(
        self,
        ctx: Context,
        local_blocks: LocalBlocks,  # levels of all fields, then the divided constants
        specs: Sequence[FieldSpec],
        constants: Sequence[ConstantSpec],
        exchange: str,  # order of the messages of halo updates
        last: Mapping[str, Any],  # the newest records of all ranks
        keywords: Mapping[str, Any],
    ) -> None:
        self._last = last
        #: Arguments that calls may change: keywords, and constants that are no arrays.
        self.keywords = {**keywords}
        self._ctx = ctx
        self._numbers = iter(range(len(local_blocks)))
        self.fields: dict[str, LocalField] = {}
        for spec in specs:
            self.fields[spec.name] = self._field(spec, local_blocks, exchange)
        self._constants: dict[str, tuple[Any, int | None]] = {}
        self._specs = constants
        for constant in constants:
            value = self._constant(constant, local_blocks)
            if isinstance(value, ctx.device.module.ndarray):
                value = ctx.device.read_only(value)
            elif not isinstance(value, Points):
                self.keywords[constant.name] = value
            self._constants[constant.name] = value, constant.ndim

    def _field(self, spec: FieldSpec, local_blocks: LocalBlocks, exchange: str) -> LocalField:
        ctx = self._ctx
        grid = Grid(ctx, ctx.grid_of().ranks.extend(spec.extra))
        options = spec.widest, spec.boundary, spec.corners, spec.dtype
        first = ctx.with_halo(None, *options, exchange, grid)
        levels = [first, *(HaloArray(first.layout) for _ in spec.depths[1:])]
        for level in levels:
            local_blocks.copy_into(next(self._numbers), level.inner)
        return LocalField(spec, levels, grid, ctx.box)

    def _constant(self, spec: ConstantSpec, local_blocks: LocalBlocks) -> Any:
        if spec.is_whole:
            return local_blocks.copy(next(self._numbers))
        if spec.ndim is None:
            return spec.value
        block = local_blocks.copy(next(self._numbers))
        return block.reshape(block.shape[block.ndim - spec.ndim :])

    @property
    def state(self) -> tuple[Array, ...]:
        """The local blocks of all levels, of the fields that are no constants."""
        fields = [field for field in self.fields.values() if not field.spec.is_constant]
        return tuple(level.inner for field in fields for level in field.levels)

    def constant_arrays(self) -> Iterator[tuple[str, Array, Box, bool]]:
        """Yield name, block and box of each array, and whether the block counts on this rank."""
        for name, field in self.fields.items():
            if field.spec.is_constant:
                yield name, field.newest.inner, field.box, True
        for spec in self._specs:
            block, ndim = self._constants[spec.name]
            if spec.is_whole:
                yield spec.name, block, whole_box(block.shape), self._ctx.rank == 0
            elif ndim is not None:
                bounds = self._ctx.box
                lengths = *(1 for _ in bounds[ndim:]), *spec.shape  # 1: all ranks have it
                pairs = [*zip(lengths, bounds, strict=True)]
                box = [
                    (0, 1) if length == 1 else bounds_of_axis for length, bounds_of_axis in pairs
                ]
                counts = not any(length == 1 and start for length, (start, _) in pairs)
                yield spec.name, block, tuple(box[len(box) - ndim :]), counts

    @property
    def levels(self) -> list[HaloArray]:
        return [level for field in self.fields.values() for level in field.levels]

    def restoring(self) -> Callable[[], None]:
        """Return a function that restores the present order of the memory of all fields."""
        orders = [(field, field.levels, field.next_level) for field in self.fields.values()]

        def restore() -> None:
            for field, levels, next_level in orders:
                field.levels, field._next_level = levels, next_level

        return restore

    def values(self, names: Iterable[str], box: Box, at: At) -> dict[str, Any]:
        """Return the values of some names for a box of the local block."""
        values: dict[str, Any] = {}
        for name in names:
            if name in self.fields:
                field = self.fields[name]
                data = tuple(part.data for part in field.parts(box))
                values[name] = data if field.spec.is_list else data[0]
            elif name in self._constants and isinstance(self._constants[name][0], Points):
                values[name] = self._points(self._constants[name][0].xy, box)
            elif name in self._constants:
                values[name] = self._of_box(*self._constants[name], box)
            elif name == VALUES[AT]:
                values[name] = at
            elif name in self.keywords:
                values[name] = self.keywords[name]
        return values

    def _points(self, xy: Array, box: Box) -> LocalPoints:
        blocks = []
        for part in (part for field in self.fields.values() for part in field.parts(box)):
            inner: Any = part.inner[: len(box)]
            blocks.append((part.data.shape, tuple(along.start for along in inner)))
            blocks.append((tuple(along.stop - along.start for along in inner), (0,) * len(box)))
        return LocalPoints(xy, self._in_whole(box), self._ctx.device.module, blocks)

    def _in_whole(self, box: Box) -> Box:
        return move_box(box, [low for low, _ in self._ctx.box])

    @staticmethod
    def _of_box(value: Any, ndim: int | None, box: Box) -> Any:
        if ndim is None:
            return value
        along = zip(value.shape, box[len(box) - ndim :], strict=True)
        return value[tuple(slice(*(0, 1) if size == 1 else rows) for size, rows in along)]

    def at(self, box: Box, step: Callable[[str], int]) -> StepAt:
        """Return the position of a box of the local block; `step` returns the step's number."""
        ctx, global_box = self._ctx, self._in_whole(box)
        return StepAt(ctx.rank, ctx.shape, global_box, ctx.device.module, step, last=self._last)

    def arguments(
        self,
        step: Callable[[str], int],  # returns the step's number
        scalars: Mapping[str, Any],  # the newest numbers
    ) -> Callable[[Binding, Box], dict[str, Any]]:
        """Return a function of all arguments of a binding for a box of the local block."""

        def arguments(binding: Binding, box: Box) -> dict[str, Any]:
            return {**self.values(binding.names, box, self.at(box, step)), **scalars}

        return arguments

    def newest_step(self, name: str) -> int:
        """Return the number of the newest step; `name` is that of the value in errors."""
        return max(0, self._ctx.step_for(name) - 1)
