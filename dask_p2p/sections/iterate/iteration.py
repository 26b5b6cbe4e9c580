"""The work of a rank of `iterate`, for all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod
from typing import Any

import numpy as np

from dask_p2p.errors import BlockMismatchError
from dask_p2p.geometry import Box, box_size
from dask_p2p.plans.rank_halo import halo_exchange
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.context import Context
from dask_p2p.sections.api.estimate import SectionEstimate
from dask_p2p.sections.api.graph import LocalBlocks
from dask_p2p.sections.exchange.halo import HaloArray, HaloPart, Pending
from dask_p2p.sections.exchange.halo_messages import elements_of
from dask_p2p.sections.gang.checkpoints import GENERATIONS, Period
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.gpu.windows import SLOTS
from dask_p2p.sections.iterate.captured import Captured
from dask_p2p.sections.iterate.first_step import FirstStep
from dask_p2p.sections.iterate.step_function import StepFunction
from dask_p2p.types import Array, DType


@dataclass(frozen=True)
class Iteration:
    """The work of each rank, for all steps."""

    function: Callable[..., Any]
    depths: tuple[tuple[tuple[int, int], ...], ...]  # of each field
    steps: int
    dtype: DType
    boundary: tuple[Any, ...]
    corners: bool
    overlap: bool | str
    exchange: str
    constants: tuple[tuple[bool, Any], ...]  # whether it is divided, and its value if not
    until: Callable[..., bool] | None
    check_every: int
    period: int | str | None
    capture: bool
    kwargs: Mapping[str, Any]

    def __call__(self, ctx: Context, local_blocks: LocalBlocks) -> tuple[Array, ...]:
        levels, constants = self._levels(ctx, local_blocks), self._constants(ctx, local_blocks)
        first, period = ctx.restore(*levels.local_blocks), Period(self.period)
        step, ctx.progress.steps = first, self.steps
        for field in levels.fields:
            ctx.update_halo(field, copy=False)
        overlaps = self.overlap
        if overlaps == "auto":
            overlaps = levels.newest.exchange.is_worth_hiding and not self.capture
        pending: Pending | None = None
        graph: Captured | None = None
        cycle = lcm(len(levels.fields) + 1, SLOTS)  # steps until each field is back in its memory
        while step < self.steps:
            if self.capture and step == first + cycle and step + 2 * cycle < self.steps:
                graph = self._captured(ctx, levels, constants, cycle)
            if graph is not None and step == first + 2 * cycle:
                graph.check(levels.fields)
            is_ready = graph is not None and step >= first + 2 * cycle
            if graph is not None and is_ready and self._is_free(step, first, cycle):
                graph()
                step += cycle
            else:
                if step == first:
                    numbers = self._first_step(ctx, levels, constants)
                else:
                    for box in _boxes(levels.newest, pending):
                        numbers = self._apply(box, levels, constants)
                levels.turn()
                step += 1
                if self._is_asked(step) and self._is_done(ctx, numbers):
                    ctx.progress.step = step
                    break
                pending = self._begun(ctx, levels, step) if overlaps else None
                if pending is None and step < self.steps:
                    ctx.update_halo(levels.newest, copy=False)
            ctx.progress.step = step
            ctx.device.keep_up(step)
            if step < self.steps and ctx.is_due(period, step):
                ctx.checkpoint(step, *levels.local_blocks)
        return levels.local_blocks

    def _begun(self, ctx: Context, levels: _Levels, step: int) -> Pending | None:
        """Begin the next halo exchange; None at the last step, or before a call of `until`."""
        if step == self.steps or self._is_asked(step + 1):  # its numbers are of a whole local block
            return None
        return ctx.update_halo_begin(levels.newest, copy=False)

    def _captured(
        self, ctx: Context, levels: _Levels, constants: list[Any], cycle: int
    ) -> Captured | None:
        """Return a graph that replays a cycle of steps; None if ranks need messages."""
        exchange = levels.newest.exchange
        device = ctx.device
        if not ctx.allreduce(np.array(exchange.can_put()), "min") or not isinstance(device, Gpu):
            return None

        def steps() -> None:
            for _ in range(cycle):
                self._apply(levels.newest.exchange.whole, levels, constants)
                levels.turn()
                exchange.put(levels.newest.data)

        return Captured(device, levels.fields, steps)

    def _is_free(self, step: int, first: int, cycle: int) -> bool:
        """Return whether a cycle without work for the host can begin after a step."""
        last = step + cycle
        if (step - first) % cycle or last >= self.steps:
            return False
        if isinstance(self.period, int) and (last - 1) // self.period > step // self.period:
            return False  # a checkpoint is due before its last step
        return not any(map(self._is_asked, range(step + 1, last + 1)))

    def _apply(self, box: Box, levels: _Levels, constants: list[Any]) -> Sequence[Any]:
        """Fill a box of the next local block; return the numbers of the function."""
        part, given = self._given(box, levels, constants)
        return self._step(given, levels.spare.inner[part.where], part)

    def _first_step(self, ctx: Context, levels: _Levels, constants: list[Any]) -> Sequence[Any]:
        """Fill the whole next local block, check the function, and return its numbers."""
        part, given = self._given(levels.newest.exchange.whole, levels, constants)
        step = FirstStep(self._step, ctx.device, levels.fields, given, part, levels.spare)
        return step()

    def _given(self, box: Box, levels: _Levels, constants: list[Any]) -> tuple[HaloPart, list[Any]]:
        """Return the part of the newest field for a box, and all arguments of the function."""
        of_fields = zip(levels.fields, self.depths, strict=True)
        parts = [field.part(box, depth) for field, depth in of_fields]
        given, where = [part.data for part in parts], parts[0].where
        for value, (is_share, _) in zip(constants, self.constants, strict=True):
            given.append(value[where] if is_share else value)
        return parts[0], given

    @cached_property
    def _step(self) -> StepFunction:
        return StepFunction(self.function, self.kwargs, self.until is not None)

    def _is_asked(self, step: int) -> bool:
        """Return whether `until` is called after a step."""
        return self.until is not None and step % self.check_every == 0

    def _is_done(self, ctx: Context, numbers: Sequence[Any]) -> bool:
        assert self.until is not None
        if not numbers or any(number is None for number in numbers):
            raise BlockMismatchError(
                "expected numbers for until= from the function, got none. Return them, after the "
                "array if it returns one."
            )
        return bool(self.until(*map(ctx.allreduce, numbers)))

    def _levels(self, ctx: Context, local_blocks: LocalBlocks) -> _Levels:
        halo = self._widest, self.boundary, self.corners, self.dtype
        spare = ctx.with_halo(None, *halo, exchange=self.exchange)
        fields = [HaloArray(spare.exchange) for _ in self.depths]
        for number, field in enumerate(fields):
            local_blocks.copy_into(number, field.inner)
        return _Levels(fields, spare)

    @property
    def _widest(self) -> tuple[tuple[int, int], ...]:
        """Width of all halos: a field gets its halo when it is the newest, and keeps it."""
        by_axis = zip(*self.depths, strict=True)
        return tuple((max(b for b, _ in sides), max(a for _, a in sides)) for sides in by_axis)

    def estimate(
        self, found: SectionEstimate, ranks: RankGrid, rank: int, inputs: Sequence[DType]
    ) -> SectionEstimate:
        """Return the estimate of one rank; `found` is the estimate for any function."""
        own = halo_exchange(ranks, rank, self._widest, self.boundary, self.corners)
        fields, count, item_bytes = len(self.depths), box_size(own.inner), self.dtype.itemsize
        has_states = self.period is not None and ranks.size > 1
        state_bytes = fields * count * item_bytes if has_states else 0
        packed_bytes, staging_bytes = (
            sum(map(elements_of, each.values())) * item_bytes for each in (own.sends, own.receives)
        )
        halo_array_bytes = prod(own.shape) * item_bytes
        constants_bytes = sum(count * each.itemsize for each in inputs[fields:])
        return replace(
            found,
            work_bytes=(fields + 1) * halo_array_bytes + constants_bytes,
            returned_bytes=fields * halo_array_bytes,
            staging_bytes=staging_bytes,
            packed_bytes=packed_bytes * (1 if found.kind == "numpy" else SLOTS),
            state_bytes=2 * GENERATIONS * state_bytes,
            step_bytes=packed_bytes,
            checkpoint_bytes=state_bytes,
        )

    def _constants(self, ctx: Context, local_blocks: LocalBlocks) -> list[Any]:
        """Return the constants, local blocks for Dask arrays; arrays are for reading only."""
        numbers, device = iter(range(len(self.depths), len(local_blocks))), ctx.device
        own = (
            local_blocks.copy(next(numbers)) if is_share else value
            for is_share, value in self.constants
        )
        return [
            device.read_only(each) if isinstance(each, device.module.ndarray) else each
            for each in own
        ]


@dataclass
class _Levels:
    """The fields with their halos, the newest first, and memory for the next one."""

    fields: list[HaloArray]
    spare: HaloArray

    @property
    def newest(self) -> HaloArray:
        return self.fields[0]

    @property
    def local_blocks(self) -> tuple[Array, ...]:
        return tuple(field.inner for field in self.fields)

    def turn(self) -> None:
        """Make the filled memory the newest field, and reuse that of the oldest for the next."""
        self.fields, self.spare = [self.spare, *self.fields[:-1]], self.fields[-1]


def _boxes(field: HaloArray, pending: Pending | None) -> Iterator[Box]:
    """Yield boxes of a local block when they can be computed, the interior before the boundary."""
    if pending is None:
        yield field.exchange.whole
        return
    interior, *boundary_parts = field.exchange.boxes
    if box_size(interior):
        yield interior
    pending.wait()
    yield from boundary_parts
