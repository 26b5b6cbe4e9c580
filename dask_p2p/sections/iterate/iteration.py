"""The work of the ranks of `iterate`, and the memory that it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
from dask.utils import funcname

from dask_p2p.backends.base import SLOTS as STREAM_SLOTS
from dask_p2p.backends.cupy import free_bytes
from dask_p2p.backends.device import gpu_obstacle
from dask_p2p.errors import InputError, MemoryLimitError
from dask_p2p.geometry import box_size
from dask_p2p.plans.halo import both_ends, plan_halo_exchange
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.outputs import Output, Outputs, Same
from dask_p2p.sections.api.rank_body import SectionEstimate
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.boundaries import functions_of, planned
from dask_p2p.sections.gang.checkpoints import GENERATIONS
from dask_p2p.sections.gpu.windows import SLOTS
from dask_p2p.sections.iterate.fields import ConstantSpec, FieldOutput, FieldSpec
from dask_p2p.sections.iterate.functions import AT, UNNAMED, VALUES, is_constant
from dask_p2p.sections.iterate.output.files import Descriptions
from dask_p2p.sections.iterate.output.series import STEPS, SeriesSpec
from dask_p2p.sections.iterate.output.stores import Checkpoint, FramesSpec
from dask_p2p.sections.iterate.step import Phase
from dask_p2p.types import DaskArray, Kind

logger = logging.getLogger(__name__)

_CACHE_BYTES = 1 << 22  # of a slab and its results, without a GPU
_GPU_SHARE = 0.5  # of the GPU's free memory, for slots of slabs; the function needs the rest
_SLABS = 8  # of a local block, at least: copies of one are concurrent with steps of another
_FIRST_SLABS, _MOST_SLABS = 32, 128  # of the first visit to a GPU, which is timed; of a later one
_MOST_STEPS = 64  # of a visit
_MOST_WHOLE_STEPS = 256  # of a visit of the whole local block
#: Least ratio of a slab's rows to those of its halo on one side, with the most steps. Each slab
#: needs memory for its halo, and the halos of a local block are computed twice. On two cores,
#: 4096 x 4096 float64 by five points took 0.53 of the time in core with 6, and 0.60 with 12.
_LEAST_RATIO: dict[Kind, int] = {"cupy": 2, "numpy": 6}
_ACTIONS = "up", "run", "down"
#: Seconds that a row took in each action in this process, by function and fields, for later runs.
_row_times: dict[Hashable, list[float]] = {}


@dataclass(frozen=True)
class Arguments:
    """Checked arguments of `iterate`."""

    phases: tuple[Phase, ...]
    fields: tuple[FieldSpec, ...]  # also constants with a halo, after the others
    scalars: Mapping[str, Any]  # NumPy numbers by name: their values before the first step
    constants: tuple[ConstantSpec, ...]
    series: tuple[SeriesSpec, ...]
    frames: tuple[FramesSpec, ...]
    checkpoint: Checkpoint | None
    names: tuple[str, ...]  # of all fields, in the order of the mapping; none without names

    @property
    def read_names(self) -> set[str]:
        """Names of all values that functions have as parameters."""
        bindings = [phase.binding for phase in self.phases]
        bindings += [spec.binding for spec in self.series]
        bindings += [field.binding for frames in self.frames for field in frames.computed.values()]
        return set().union(*(binding.names for binding in bindings))


@dataclass(frozen=True)
class Iteration(Arguments):
    """The work of each rank, for all steps."""

    shape: tuple[int, ...]  # of the whole array
    steps: int
    overlap: bool | str
    exchange: str
    until: Callable[..., bool] | None
    check_every: int
    period: int | str | None
    max_time: str | None
    capture: bool | str
    kwargs: Mapping[str, Any]
    #: True if fields lie in host memory, and go through a GPU slab by slab.
    is_streamed: bool = False
    steps_per_visit: int | None = None  # of a slab; None: as memory allows
    slab_rows: int | None = None  # the same

    @property
    def returns_steps(self) -> bool:
        """True if the number of steps is a result."""
        return bool(self.series) or self.max_time is not None

    @cached_property
    def reads_at(self) -> bool:
        """True if a function has a parameter `at`, and may read the newest records."""
        return VALUES[AT] in self.read_names

    def settings(self) -> dict[str, str]:
        """Return texts of the functions and their arguments, by name, which later runs compare.

        Values of divided arrays are not among them.
        """
        values = {spec.name: spec.value for spec in self.constants} | {**self.kwargs}
        values["the names of arguments"] = sorted(values)
        values |= {f"the record {spec.name}": spec.record.function for spec in self.series}
        values["the functions"] = [(phase.function, phase.fields) for phase in self.phases]
        for field in self.fields:
            values[f"the boundary of {field.name}"] = field.boundary
            values[f"the depth of {field.name}"] = field.depths
        described = Descriptions(values.values())
        return {name: described(value) for name, value in values.items()}

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """All functions of the user."""
        return [
            *(phase.function for phase in self.phases),
            *(spec.record.function for spec in self.series),
            *(field.function for frames in self.frames for field in frames.computed.values()),
            *(end for spec in self.fields for end in functions_of(spec.boundary)),
            *([] if self.until is None else [self.until]),
        ]

    @property
    def has_constant_arguments(self) -> bool:
        """True if no function can change the keywords and constants."""
        constants = (spec.value for spec in self.constants)
        return all(map(is_constant, [*self.kwargs.values(), *constants]))

    @cached_property
    def is_staggered(self) -> bool:
        """True if a field is longer than the first one."""
        return any(spec.extra for spec in self.fields)

    @property
    def outputs(self) -> Outputs:
        """The outputs of the section: all levels of the fields, and then the numbers."""
        fields = [spec for spec in self.fields if not spec.is_constant]
        outputs: list[Output] = [
            FieldOutput(spec.dtype, spec.extra, self.is_streamed)
            for spec in fields
            for _ in spec.depths
        ]
        outputs += map(Same, self.scalars.values())
        outputs += [Same(spec.unset(spec.count(self.steps))) for spec in self.series]
        outputs += [Same(0)] if self.returns_steps else []
        return Outputs(tuple(outputs), tuple(map(str, range(len(outputs)))))

    def arrange(self, arrays: Sequence[DaskArray]) -> Any:
        """Return the results in the form of the fields."""
        next_arrays = iter(arrays)
        results: dict[str, Any] = {}
        for spec in (spec for spec in self.fields if not spec.is_constant):
            levels = [next(next_arrays) for _ in spec.depths]
            results[spec.name] = levels if spec.is_list else levels[0]
        if UNNAMED in results:
            result = results[UNNAMED]
            return tuple(result) if isinstance(result, list) else result
        names = [*self.scalars, *(spec.name for spec in self.series)]
        if self.returns_steps:
            names.append(STEPS)
        results |= {name: next(next_arrays) for name in names}
        return {name: results[name] for name in dict.fromkeys((*self.names, *names))}

    def estimate(
        self,
        section_estimate: SectionEstimate,
        ranks: RankGrid,
        rank: int,
        inputs_bytes: Sequence[int],
    ) -> SectionEstimate:
        """Return the estimate of one rank; `section_estimate` is the estimate for any function."""
        field_bytes = [_bytes_of(spec, ranks, rank, self.is_streamed) for spec in self.fields]
        work, returned, state, sent, received = (
            sum(sizes) for sizes in zip(*field_bytes, strict=True)
        )
        visit_bytes = work if self.is_streamed else 0
        if self.is_streamed and len(list(ranks.blocks(rank))) == 1:
            returned = 0  # the output blocks
        constants = inputs_bytes[sum(len(spec.depths) for spec in self.fields) :]
        has_states = self.period is not None and ranks.size > 1
        item_bytes = {spec.name: spec.dtype.itemsize for spec in self.fields}
        sized = ranks.box(rank), self.shape, item_bytes
        series_bytes = sum(spec.size_bytes(self.steps) for spec in self.series)
        state += series_bytes
        return replace(
            section_estimate,
            work_bytes=work + sum(constants),
            returned_bytes=returned,
            staging_bytes=received,
            packed_bytes=sent * (1 if section_estimate.kind == "numpy" else SLOTS),
            state_bytes=2 * GENERATIONS * state if has_states else 0,
            frames_bytes=sum(frames.size_bytes(*sized) for frames in self.frames),
            series_bytes=3 * series_bytes,  # the values, the results, and the output's copy
            step_bytes=sent,
            visit_bytes=visit_bytes,
            checkpoint_bytes=state if has_states else 0,
        )


class _FieldBytes(NamedTuple):
    """Memory and messages of a field on one rank."""

    work: int  # all levels with their halos
    returned: int  # levels that are results
    state: int  # levels in a checkpoint
    sent: int  # halos, in an update
    received: int


def _bytes_of(spec: FieldSpec, ranks: RankGrid, rank: int, is_streamed: bool) -> _FieldBytes:
    ranks = ranks.extend(spec.extra)
    exchange = plan_halo_exchange(ranks, rank, spec.widest, planned(spec.boundary), spec.corners)
    levels, item_bytes = len(spec.depths), spec.dtype.itemsize
    results = 0 if spec.is_constant else levels
    level_bytes = prod(exchange.shape) * item_bytes
    return _FieldBytes(
        work=(levels + (not spec.is_constant and not is_streamed)) * level_bytes,
        returned=results * level_bytes,
        state=results * prod(ranks.shape(rank)) * item_bytes,
        sent=sum(map(box_size, chain(*exchange.sends.values()))) * item_bytes,
        received=sum(map(box_size, chain(*exchange.receives.values()))) * item_bytes,
    )


class VisitPlan:
    """The number of steps of a visit, the rows of a slab, and the halos that they need.

    A GPU's first visit is short. `choose` then finds the sizes by its times, also those of later
    runs of the same function in this process.

    Raises `InputError` if they do not fit the array, and `MemoryLimitError` if a GPU has too little
    memory.
    """

    def __init__(self, iteration: Iteration, ctx: Context) -> None:
        self._specs, shape = iteration.fields, iteration.shape
        ndim, rows = len(shape), ctx.box[0][1] - ctx.box[0][0]
        self.kind: Kind = "numpy" if gpu_obstacle() is not None else "cupy"
        fitting_rows = self._most_rows(ctx)
        #: By axis: number of elements that a step reads on each side of a point.
        self.depth = [max(max(spec.widest[a]) for spec in self._specs) for a in range(ndim)]
        # One slab needs no halos of other slabs or ranks, and one slot. Its copies are not
        # concurrent with steps: only in long visits they take little time.
        is_long = (iteration.steps_per_visit or _MOST_WHOLE_STEPS) > _MOST_STEPS
        is_whole = self.kind == "cupy" and ctx.size == 1 and iteration.slab_rows is None
        is_whole = is_whole and is_long and rows + 2 * self.depth[0] <= STREAM_SLOTS * fitting_rows
        #: By axis: whether slabs or ranks divide it, so that its halo is for all steps of a visit.
        self.is_wide = [n > 1 or (axis == 0 and not is_whole) for axis, n in enumerate(ctx.grid)]
        self.is_periodic = [
            any("periodic" in both_ends(s.boundary[a]) for s in self._specs if any(s.widest[a]))
            for a in range(ndim)
        ]
        widths = [n * is_wide for n, is_wide in zip(self.depth, self.is_wide, strict=True)]
        pairs = [(length, width) for length, width in zip(shape, widths, strict=True) if width]
        longest = min((length // width for length, width in pairs), default=iteration.steps)
        steps = self._most_steps(iteration, rows, fitting_rows, longest)
        names = tuple(funcname(phase.function) for phase in iteration.phases)
        fields = tuple((spec.dtype.str, spec.depths) for spec in self._specs)
        self._key = names, fields, shape, tuple(ctx.grid)
        row_times = _row_times.get(self._key, [inf] * len(_ACTIONS))
        figures = [steps, fitting_rows, self.kind == "cupy", -rows, *np.negative(row_times)]
        agreed = ctx.allreduce(np.array(figures), "min")
        #: The number of steps of a visit, at first and at most.
        self.steps, self._fitting_rows, is_on_gpus, least = map(int, agreed[:4])
        self.most_steps, self._rows = self.steps, -least
        #: The fields with halos for all steps of a visit.
        self.specs = list(map(self._widened, self._specs))
        halo_rows = self.steps * self.depth[0] * self.is_wide[0]
        most_rows = self._fitting_rows - 2 * halo_rows
        if self.kind == "cupy" and most_rows < 1:
            raise MemoryLimitError(
                f"on_gpu='stream': expected GPU memory for a row and {2 * halo_rows} rows of "
                f"its halo, got room for {fitting_rows} rows in all. Give a smaller "
                f"steps_per_visit, or more ranks on other GPUs."
            )
        self._requested = iteration.steps_per_visit, iteration.slab_rows
        #: True on all ranks if they time the first visit.
        self.is_timed = bool(is_on_gpus) and self.is_wide[0] and None in self._requested
        slabs = _FIRST_SLABS if self.is_timed else _SLABS if self.is_wide[0] else 1
        by_size = -(-rows // slabs)
        #: Rows that a slab takes over from the previous one after each step: what steps read beyond
        #: their own rows in levels that are 1, 2, ... steps old, and `depth` more at the first end.
        self.strip_rows = max(
            (age + 1) * self.depth[0] + max(depth[0])
            for spec in self._specs
            for age, depth in enumerate(spec.depths, 1)
        )
        if self.is_wide[0]:
            by_size = min(by_size, max(most_rows, halo_rows))
        self.slab_rows = iteration.slab_rows or max(1, by_size)
        if self.is_timed and np.isfinite(agreed).all():
            self.choose(-agreed[4:])
        elif self.is_timed and iteration.steps_per_visit is None:
            self.steps = 1

    def choose(self, row_times: Sequence[float]) -> None:
        """Choose the sizes by the seconds that a row takes "up", in one step's "run", and "down".

        A visit takes as long as the slowest of the three for all slabs, and as the others for one.
        """
        self.is_timed = False
        _row_times[self._key] = [*row_times]
        row_s = dict(zip(_ACTIONS, map(float, row_times), strict=True))
        requested_steps, requested_rows = self._requested
        doubled = (1 << number for number in range(self.most_steps.bit_length()))
        steps_of_visits = [self.steps] if requested_steps else [*doubled, self.most_steps]
        counts = (_SLABS << number for number in range((_MOST_SLABS // _SLABS).bit_length()))
        rows_of_slabs = {requested_rows or -(-self._rows // count) for count in counts}

        def step_s(sizes: tuple[int, int]) -> float:
            steps, rows = sizes
            slabs, later_steps = -(-self._rows // rows), steps - 1
            up, down = (rows * row_s[action] for action in ("up", "down"))
            run = (steps * rows + later_steps * self.strip_rows) * row_s["run"]
            halo_rows = steps * later_steps * self.depth[0]  # at both ends of the local block
            last = run + halo_rows * row_s["run"] + down
            return (up + (slabs - 1) * max(up, run, down) + last) / steps

        pairs = sorted(product(map(int, steps_of_visits), rows_of_slabs))
        fitting = [(k, n) for k, n in pairs if n + 2 * k * self.depth[0] <= self._fitting_rows]
        sizes = self.steps, self.slab_rows = min(
            fitting or [(self.steps, self.slab_rows)], key=step_s
        )
        expected_ms = 1e3 * step_s(sizes)
        is_by_bus = max(row_s["up"], row_s["down"]) > sizes[0] * row_s["run"]
        text = "visits of %d steps to slabs of %d rows: %.3g ms a step, as long as %s takes"
        logger.info(text, *sizes, expected_ms, "the bus" if is_by_bus else "the function")

    def _most_steps(self, iteration: Iteration, rows: int, most_rows: int, longest: int) -> int:
        """Return the number of steps of a visit: the argument, or a number for thick slabs."""
        requested = iteration.steps_per_visit
        if requested is not None and longest < requested <= iteration.steps:
            raise InputError(
                f"steps_per_visit: expected at most {longest}, as its halo is not longer than an "
                f"axis, got {requested}. Give a smaller number."
            )
        slab = min(most_rows // 2, max(1, rows // _SLABS))
        chosen = min(_MOST_STEPS, slab // max(1, _LEAST_RATIO[self.kind] * self.depth[0]))
        chosen = chosen if self.is_wide[0] else _MOST_WHOLE_STEPS
        return max(1, min(requested or chosen, longest, iteration.steps))

    def _most_rows(self, ctx: Context) -> int:
        across = box_size(ctx.box[1:])
        row_bytes = sum(levels_of(spec) * spec.dtype.itemsize * across for spec in self._specs)
        limit_bytes = _CACHE_BYTES
        if self.kind == "cupy":
            limit_bytes = int(free_bytes() * _GPU_SHARE) // STREAM_SLOTS
        return int(limit_bytes // max(1, row_bytes))

    def _widened(self, spec: FieldSpec) -> FieldSpec:
        widths, boundary = [*spec.widest], [*spec.boundary]
        for axis, is_wide in enumerate(self.is_wide):
            if not is_wide:
                continue
            width = self.most_steps * self.depth[axis]
            if not any(widths[axis]):  # its steps do not read the halo: those of others do
                is_other = "periodic" in both_ends(boundary[axis])
                boundary[axis] = "none" if is_other else boundary[axis]
                boundary[axis] = "periodic" if self.is_periodic[axis] else boundary[axis]
            widths[axis] = width, width
        return replace(spec, depths=(tuple(widths),) * len(spec.depths), boundary=tuple(boundary))


def levels_of(spec: FieldSpec) -> int:
    """Return the number of a field's arrays in a slab: its levels, and the next one."""
    return len(spec.depths) + (not spec.is_constant)
