"""Steps of `iterate` on fields that lie in host memory, and go through a GPU slab by slab.

A *visit* makes several steps. It fills halos that are as wide as all of its steps need, and then
takes the local block apart along the first axis. A step of a slab reads `depth` rows beyond those
that it makes. So each step ends `depth` rows before the last one, and the next slab goes on there::

    rows      ---halo---|----slab 0----|----slab 1----|----slab 2----|---halo---
    copied in .........................|..............|.........................
    step 1         ................|..............|.........................
    step 2              .......|..............|.........................           copied out

No row between slabs is computed twice. The next slab also reads the last rows of a slab: those that
were copied in, before the first step, and those of each result, which *strips* keep for it. Each
row goes in once and out once in a visit, in three concurrent streams of copies and steps.
Results go where the rows came from: fields need no second memory on the host. Without a GPU the
function gets NumPy arrays, and slabs are small enough for a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise, starmap
from types import SimpleNamespace
from typing import Any

import numpy as np
from dask.utils import format_bytes
from distributed import warn

from dask_p2p.backends.base import SLOTS
from dask_p2p.backends.device import device_work
from dask_p2p.backends.host_memory import CANNOT_PIN, pin_while, warn_once
from dask_p2p.errors import MemoryLimitError, P2PWarning
from dask_p2p.geometry import Box, box_shape, box_size, box_slices, move_box, round_up
from dask_p2p.plans.halo import both_ends, plan_halo_exchange
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.checks import check_call
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.loop import Loop
from dask_p2p.sections.exchange.boundaries import At, Ends, functions_of, planned
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.exchange.halo import HaloLayout, HaloPart
from dask_p2p.sections.gpu.streams import SlabGpu, SlabSlots
from dask_p2p.sections.iterate.fields import FieldSpec
from dask_p2p.sections.iterate.functions import Binding
from dask_p2p.sections.iterate.iteration import Iteration, VisitPlan, levels_of
from dask_p2p.sections.iterate.local_fields import LocalField, LocalFields
from dask_p2p.types import Array

_ALIGNMENT_BYTES = 512
_FAR = 1 << 60  # beyond all arrays: the end of a periodic axis


@dataclass
class _SlabField:
    """The arrays of a field for one slab, the newest first."""

    local: LocalField
    start: int  # the first row in them; 0 is the first row of the local block
    stop: int
    levels: list[Array] = field(default_factory=list)
    next_level: Any = None  # memory that the next step fills

    def rotate(self) -> None:
        """Make the filled memory the newest level."""
        self.levels, self.next_level = [self.next_level, *self.levels[:-1]], self.levels[-1]

    @cached_property
    def _offsets(self) -> list[int]:
        return [-self.start, *(start for start, _ in self.local.layout.halo.inner[1:])]

    def view(self, level: Array, box: Box) -> Array:
        """Return a box of the local block, which may reach into its halo."""
        view: Array = level[box_slices(move_box(box, self._offsets))]
        return view

    def host_rows(self, start: int, stop: int) -> list[Array]:
        """Return rows of all levels in host memory."""
        first = self.local.layout.halo.inner[0][0]
        return [level.data[first + start : first + stop] for level in self.local.levels]


def _slot_bytes(slab_fields: Sequence[_SlabField]) -> int:
    return sum(
        levels_of(slab.local.spec)
        * round_up(slab.host_rows(slab.start, slab.stop)[0].nbytes, _ALIGNMENT_BYTES)
        for slab in slab_fields
    )


class StreamedSteps:
    """Steps of the fields of one rank that lie in host memory."""

    numbers: Sequence[Any] = ()
    first = 0  # the first step of this attempt

    def __init__(
        self, iteration: Iteration, ctx: Context, local: LocalFields, plan: VisitPlan
    ) -> None:
        self._iteration, self._ctx, self._local, self._plan = iteration, ctx, local, plan
        (self._phase,) = iteration.phases
        for spec in iteration.fields:  # the function gets halos of one step
            local.fields[spec.name].spec = spec
        self._fields = list(local.fields.values())
        self.block_box = self._fields[0].layout.local_box
        self._device: Host = HOST if plan.kind == HOST.kind else SlabGpu()
        self._is_stale, self._is_checked = True, False
        step = self._number = SimpleNamespace(value=0)
        #: Without a reference to this object, as a cycle would keep the fields in memory.
        self._step_of = lambda name: step.value
        self._layouts: dict[Any, HaloLayout | None] = {}
        self._slots: _HostSlots | SlabSlots | None = None
        self._constants: dict[str, Any] | None = None  # arguments that are the same in each step
        self._parts = 0  # number of slabs of all visits so far
        self._strips: dict[str, Array] = {}  # by name of field, for each step of a visit
        self._is_staged = False  # whether fields go through other memory, which is pinned

    def make(self, step: int, loop: Loop) -> int:
        """Make the steps of a visit, until a callback is due; return their number."""
        count = min(self._plan.steps, loop.free_steps(step))
        self._update_halos()
        with nullcontext() if self._device is HOST else device_work():
            if self._constants is None:
                self._prepare()
            slots = self._slots = self._slots or self._make_slots()
            try:
                self._visit(slots, step, count)
            finally:
                slots.wait()  # no copy uses the fields' memory
        if self._plan.is_timed:
            self._choose_sizes(slots, count)
        self._is_stale = True
        return count

    def _choose_sizes(self, slots: Any, count: int) -> None:
        """Choose the sizes of later visits by the times of the first one; the same on all ranks."""
        plan, self._plan.is_timed = self._plan, False
        seconds = [slots.action_s(action) for action in ("up", "run", "down")]
        per_row = np.array(seconds) / plan.slab_rows / (1, count, 1)
        slowest = self._ctx.allreduce(per_row, "max")
        if slowest.all():
            plan.choose(slowest)
            self._slots, self._parts = None, 0

    def _visit(self, slots: _HostSlots | SlabSlots, step: int, count: int) -> None:
        """Queue the copies of all slabs, and make their steps."""
        regions, slabs = self._regions(count), list[list[_SlabField]]()
        first, self._parts = self._parts, self._parts + len(regions)
        for number in range(len(regions) + 1):
            part = first + number
            is_last = number == len(regions)
            # The slot has been copied out, of earlier visits as well.
            is_free = [("down", part - slots.count)] if part >= slots.count else []
            if not is_last:
                slabs.append(self._slab_fields(number, regions[number]))
                self._place(slots, part, slabs[-1])
            if number:
                boxes, slab_fields = regions[number - 1], slabs[number - 1]
                with slots.action("run", part - 1, [("up", part - 1), *is_free]):
                    if not is_last:
                        self._share_rows(slab_fields, slabs[number])
                    self._compute(step, boxes, slab_fields)
                with slots.action("down", part - 1, [("run", part - 1)]):
                    self._copy_out(slots, part - 1, boxes[-1][0], slab_fields)
            if not is_last:  # at the end, as threads may fill a slot before its copy
                with slots.action("up", part, is_free):
                    self._copy_in(slots, part, *slabs[-2:])

    @staticmethod
    def _place(slots: Any, part: int, slab_fields: Sequence[_SlabField]) -> None:
        """Set the arrays of a slab, which lie in the slot of a part."""
        index = 0
        for slab in slab_fields:
            rows = slab.host_rows(slab.start, slab.stop)[0]
            for _ in range(levels_of(slab.local.spec)):
                slab.levels.append(slots.array(part, index, rows))
                index += round_up(rows.nbytes, _ALIGNMENT_BYTES)
            if not slab.local.spec.is_constant:
                slab.next_level = slab.levels.pop()

    @staticmethod
    def _copy_in(slots: Any, part: int, *slabs: Sequence[_SlabField]) -> None:
        """Copy the rows in of the last one of two slabs, which the other one does not have."""
        for *before, slab in zip(*slabs, strict=True):
            first = max((other.stop - slab.start for other in before), default=0)
            all_rows = slab.host_rows(slab.start, slab.stop)
            for level, rows in zip(slab.levels, all_rows, strict=True):
                slots.copy_in(part, level[first:], rows[first:])

    def _share_rows(self, slabs: Sequence[_SlabField], next_slabs: Sequence[_SlabField]) -> None:
        for slab, next_slab in zip(slabs, next_slabs, strict=True):
            count = slab.stop - next_slab.start
            for level, next_level in zip(slab.levels, next_slab.levels, strict=True):
                next_level[:count] = level[len(level) - count :]

    def _copy_out(
        self, slots: Any, part: int, rows: tuple[int, int], slab_fields: Sequence[_SlabField]
    ) -> None:
        start, stop = max(0, rows[0]), min(rows[1], self.block_box[0][1])
        if start >= stop:
            return
        for slab in (slab for slab in slab_fields if not slab.local.spec.is_constant):
            for host_rows, level in zip(slab.host_rows(start, stop), slab.levels, strict=True):
                slots.copy_out(part, host_rows, level[start - slab.start : stop - slab.start])

    def current(self, names: Collection[str]) -> Callable[[Binding, Box], dict[str, Any]]:
        """Update halos after a step; return a function of all values of some names."""
        self._update_halos()
        return self._local.arguments(self._local.newest_step, {})

    def _update_halos(self) -> None:
        if self._is_stale:
            fields = (field for field in self._fields if field.has_halo)
            updated = [field for field in fields if not field.spec.is_constant]
            for number in range(max((len(field.levels) for field in updated), default=0)):
                levels = [field.levels[number] for field in updated if number < len(field.levels)]
                exchange = self._ctx.halo_exchange(levels, is_wide=True)
                exchange.begin(levels, in_background=False).wait()
            self._is_stale = False

    @property
    def _slabs(self) -> list[tuple[int, int]]:
        rows, thickness = self.block_box[0][1], self._plan.slab_rows
        if not box_size(self.block_box):
            return []
        return [(row, min(row + thickness, rows)) for row in range(0, rows, thickness)]

    def _make_slots(self) -> _HostSlots | SlabSlots:
        """Return memory for slabs, thinner ones if the GPU has too little."""
        plan, warn = self._plan, partial(warn_once, _warn, "iterate")
        while True:
            slabs = list(starmap(self._slab_fields, enumerate(self._regions(plan.steps))))
            slot_bytes = max(map(_slot_bytes, slabs), default=0)
            count = min(SLOTS, max(1, len(slabs)))
            self._strips = {}  # frees the memory of other sizes first
            try:
                self._strips = self._make_strips(plan.strip_rows if len(slabs) > 1 else 0)
                if self._device is HOST:
                    return _HostSlots(slot_bytes)
                return SlabSlots(slot_bytes, count, warn, plan.is_timed, self._is_staged)
            except MemoryError as exc:
                if plan.slab_rows == 1 or not plan.is_wide[0]:
                    raise MemoryLimitError(
                        f"on_gpu='stream': expected {format_bytes(count * slot_bytes)} of free "
                        f"memory on the GPU for slabs of {plan.slab_rows} rows, got: {exc}. Give "
                        f"a smaller slab_rows or steps_per_visit, or delete arrays on the GPU."
                    ) from exc
                plan.slab_rows = -(-plan.slab_rows // 2)

    def _make_strips(self, rows: int) -> dict[str, Array]:
        """Return memory for the last rows of all fields after each step."""
        strips = {}
        for local in (local for local in self._fields if not local.spec.is_constant):
            shape = self._plan.steps, rows, *local.levels[0].data.shape[1:]
            strips[local.spec.name] = self._device.zeros(shape, local.spec.dtype)
        if self._device is not HOST:  # the steps are in another stream
            self._device.module.cuda.Stream.null.synchronize()
        return strips

    def _prepare(self) -> None:
        """Set the arguments that are the same in each step, and pin the fields' memory."""
        names = self._phase.binding.names - {f.spec.name for f in self._fields}
        at = self._local.at(self.block_box, self._ctx.step_for)
        values, module = self._local.values(names, self.block_box, at), self._device.module
        self._constants = {
            name: module.asarray(value) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        if self._device is HOST:
            return
        levels = [level for f in self._fields for level in f.levels if level.data.nbytes]
        unpin = list[Callable[[], Any]]()
        try:
            unpin.extend(pin_while(level, level.data) for level in levels)
        except (module.cuda.runtime.CUDARuntimeError, MemoryError) as exc:
            warn_once(_warn, "iterate", CANNOT_PIN, f"{type(exc).__name__}: {exc}")
            self._is_staged = True
            for unpin_level in unpin:  # the slots may need all that can be pinned
                unpin_level()
        module.cuda.Stream.null.synchronize()  # it has made the constants

    # --- one slab

    def _limits(self, axis: int) -> tuple[int, int]:
        """Return the ends of the array along an axis, as positions in the local block."""
        plan, (start, _) = self._plan, self._ctx.box[axis]
        if plan.is_wide[axis] and plan.is_periodic[axis]:
            return -_FAR, _FAR
        return -start, self._iteration.shape[axis] - start

    def _regions(self, count: int) -> list[list[Box]]:
        """Return, for each slab and step of a visit, the box that the step makes."""
        (low, _), depth, slabs = self._limits(0), self._plan.depth[0], self._slabs
        regions: list[list[Box]] = [[] for _ in slabs]
        for number in range(1, count + 1):
            (start, stop), *across = self._block_region(count - number)
            ends = [row - number * depth for row, _ in slabs[1:]]
            # The first slab with `depth` rows from the start on makes all rows before its end.
            ends = [end if end >= max(start, low + depth) else start for end in ends]
            for boxes, rows in zip(regions, pairwise([start, *ends, stop]), strict=True):
                boxes.append((rows, *across))
        return regions

    def _block_region(self, ahead: int) -> Box:
        """Return the box that later steps read, or the local block; `ahead` is their number.

        It does not end where a step would read a part of its halo beyond an end of the array.
        """
        plan, region = self._plan, []
        for axis, (start, stop) in enumerate(self.block_box):
            low, high = self._limits(axis)
            if plan.is_wide[axis]:
                depth = plan.depth[axis]
                start, stop = max(low, start - ahead * depth), min(high, stop + ahead * depth)
                if ahead < plan.steps:
                    start = low if start - low < depth else start
                    stop = high if high - stop < depth else stop
            region.append((start, stop))
        return tuple(region)

    def _slab_fields(self, number: int, regions: Sequence[Box]) -> list[_SlabField]:
        """Return the fields of a slab, with the rows that its steps need."""
        (low, high), slabs = self._limits(0), self._slabs
        depth = self._plan.depth[0] * self._plan.is_wide[0]
        start = max(low, min(rows[0] for rows, *_ in regions) - depth)
        stop = slabs[number][1]
        if number == len(slabs) - 1:
            stop = self._block_region(len(regions))[0][1]
        slab_fields = []
        for local in self._fields:
            (before, after), (first, last) = local.spec.widest[0], both_ends(local.spec.boundary[0])
            before = 0 if start > low or first == "none" else before
            after = 0 if stop < high or last == "none" else after
            slab_fields.append(_SlabField(local, start - before, stop + after))
        return slab_fields

    def _compute(self, first: int, regions: Sequence[Box], slab_fields: list[_SlabField]) -> None:
        fields = {slab.local.spec.name: slab for slab in slab_fields}
        for number, region in enumerate(regions):
            start, stop = region[0]
            if start == stop:  # the next slab makes these rows, and those of later steps
                break
            self._number.value = first + number
            for name in self._make_step(fields, region):
                fields[name].rotate()
                if number + 1 < len(regions):
                    self._complete(fields[name], region, number)

    def _complete(self, slab: _SlabField, region: Box, number: int) -> None:
        """Add the rows and ends beyond a result, and keep its last rows for the next slab.

        The first slab gets old rows of a strip, which it does not read.
        """
        strip, level = self._strips[slab.local.spec.name][number], slab.levels[0]
        start, stop = (row - slab.start for row in region[0])
        before, last = min(len(strip), start), min(len(strip), stop)
        level[start - before : start] = strip[len(strip) - before :]
        self._fill_ends(slab, region)
        strip[len(strip) - last :] = level[stop - last : stop]

    def _make_step(self, fields: Mapping[str, _SlabField], region: Box) -> list[str]:
        """Call the function for a region; return the names of the fields that it changes."""
        values, phase, parts, outs = {**(self._constants or {})}, self._phase, {}, {}
        for name, slab in fields.items():
            spec = slab.local.spec
            boxes = [self._read_box(spec, region, depth) for depth in spec.depths]
            pairs = zip(slab.levels, boxes, strict=True)
            data = [self._device.read_only(slab.view(level, box)) for level, box in pairs]
            values[name] = tuple(data) if spec.is_list else data[0]
            if name in phase.fields:
                inner = box_slices(region, within=boxes[0])
                parts[name] = HaloPart(data[0], inner, ())
                outs[name] = slab.view(slab.next_level, region)
        if not self._is_checked:
            self._is_checked = True
            return check_call(phase, self._device, values, parts, outs)
        returned = phase.fill(self._device, values, outs, parts)
        return [*phase.fields] if phase.fills_out else [*returned.blocks]

    def _read_box(self, spec: FieldSpec, region: Box, depth: Sequence[tuple[int, int]]) -> Box:
        """Return the box that a step on a region reads: with no halo where the boundary is none."""
        box = []
        for axis, ((start, stop), (before, after)) in enumerate(zip(region, depth, strict=True)):
            (low, high), (first, last) = self._limits(axis), both_ends(spec.boundary[axis])
            low, high = low if first == "none" else -_FAR, high if last == "none" else _FAR
            box.append((max(low, start - before), min(high, stop + after)))
        return tuple(box)

    def _fill_ends(self, slab: _SlabField, region: Box) -> None:
        """Set the values beyond the ends of the array that the next step reads."""
        spec = slab.local.spec
        limits = [self._limits(axis) for axis in range(len(region))]
        touches = tuple(
            (start == low, stop == high)
            for (start, stop), (low, high) in zip(region, limits, strict=True)
        )
        position = region if functions_of(spec.boundary) else None
        key = spec.name, box_shape(region), touches, position
        if key not in self._layouts:
            self._layouts[key] = self._layout(spec, region, touches)
        layout = self._layouts[key]
        if layout is not None:
            inner = layout.halo.inner
            of_axes = zip(region, inner, layout.halo.shape, strict=True)
            box = tuple((start - a, start - a + size) for (start, _), (a, _), size in of_axes)
            data = slab.view(slab.levels[0], box)
            layout.fill(data)
            if layout.ends is not None:
                layout.ends.fill(data)

    def _layout(
        self, spec: FieldSpec, region: Box, touches: Sequence[tuple[bool, bool]]
    ) -> HaloLayout | None:
        """Return the layout of a region with what lies beyond the ends; None: nothing does."""
        boundary = tuple(
            tuple(
                end if is_end and any(widths) else "none"
                for end, is_end in zip(both_ends(ends), at_ends, strict=True)
            )
            for ends, at_ends, widths in zip(spec.boundary, touches, spec.widest, strict=True)
        )
        if all(end == "none" for ends in boundary for end in ends):
            return None
        alone = RankGrid(tuple((b - a,) for a, b in region), (1,) * len(region))
        halo = plan_halo_exchange(alone, 0, spec.widest, planned(boundary), True)
        ctx, shape = self._ctx, self._iteration.shape
        placed = move_box(region, [low for low, _ in ctx.box])
        at = At(ctx.rank, shape, placed, self._device.module, self._step_of)
        ends = Ends(halo, spec.boundary, at, self._device, spec.dtype)
        return HaloLayout(halo, spec.dtype, "", device=self._device, ends=ends)


class _HostSlots:
    """Memory of the host for two slabs in turn: small ones stay in a cache."""

    count = 2

    def __init__(self, slot_bytes: int) -> None:
        self._memory = [np.empty(slot_bytes, np.uint8) for _ in range(self.count)]

    def array(self, part: int, index: int, like: Any) -> Array:
        """Return an array with the shape and dtype of `like` in a part's slot, from a byte on."""
        memory = self._memory[part % self.count][index:][: like.nbytes]
        array: Array = memory.view(like.dtype).reshape(like.shape)
        return array

    def action(self, name: str, part: int, after: Any) -> Any:
        return nullcontext()

    def copy_in(self, part: int, to: Array, rows: Array) -> None:
        np.copyto(to, rows)

    copy_out = copy_in

    def wait(self) -> None:
        pass


def _warn(text: str) -> None:
    warn(text, P2PWarning)
