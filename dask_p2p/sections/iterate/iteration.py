"""The work of the ranks of `iterate`, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from dask_p2p.plans.halo import plan_halo_exchange
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.outputs import Output, Outputs, Same
from dask_p2p.sections.api.rank_body import SectionEstimate
from dask_p2p.sections.exchange.boundaries import functions_of, planned
from dask_p2p.sections.exchange.regions import elements_of
from dask_p2p.sections.gang.checkpoints import GENERATIONS
from dask_p2p.sections.gpu.windows import SLOTS
from dask_p2p.sections.iterate.fields import ConstantSpec, FieldOutput, FieldSpec, ScalarSpec
from dask_p2p.sections.iterate.functions import AT, VALUES, is_constant
from dask_p2p.sections.iterate.output.files import Descriptions
from dask_p2p.sections.iterate.output.series import SeriesSpec
from dask_p2p.sections.iterate.output.stores import StoreSpecs
from dask_p2p.sections.iterate.step import Phase


@dataclass(frozen=True)
class Iteration:
    """The work of each rank, for all steps."""

    phases: tuple[Phase, ...]
    fields: tuple[FieldSpec, ...]  # also constants with a halo
    scalars: tuple[ScalarSpec, ...]
    constants: tuple[ConstantSpec, ...]
    series: tuple[SeriesSpec, ...]
    stores: StoreSpecs
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

    @property
    def returns_steps(self) -> bool:
        """True if the number of steps is a result."""
        return bool(self.series) or self.max_time is not None

    @cached_property
    def reads_at(self) -> bool:
        """True if a function has a parameter `at`, and may read the newest records."""
        bindings = [phase.binding for phase in self.phases]
        bindings += [spec.binding for spec in self.series]
        return VALUES[AT] in self.stores.names.union(*(binding.names for binding in bindings))

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
            *(field.function for frames in self.stores.frames for field in frames.computed),
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
            FieldOutput(spec.dtype, spec.extra) for spec in fields for _ in spec.depths
        ]
        outputs += [Same(spec.value) for spec in self.scalars]
        outputs += [Same(spec.unset(spec.count(self.steps))) for spec in self.series]
        outputs += [Same(0)] if self.returns_steps else []
        return Outputs(tuple(outputs), tuple(map(str, range(len(outputs)))))

    def estimate(
        self,
        section_estimate: SectionEstimate,
        ranks: RankGrid,
        rank: int,
        inputs_bytes: Sequence[int],
    ) -> SectionEstimate:
        """Return the estimate of one rank; `section_estimate` is the estimate for any function."""
        field_bytes = [_bytes_of(spec, ranks, rank) for spec in self.fields]
        work, returned, state, sent, received = (
            sum(sizes) for sizes in zip(*field_bytes, strict=True)
        )
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
            frames_bytes=sum(frames.size_bytes(*sized) for frames in self.stores.frames),
            series_bytes=3 * series_bytes,  # the values, the results, and the output's copy
            step_bytes=sent,
            checkpoint_bytes=state if has_states else 0,
        )


class _FieldBytes(NamedTuple):
    """Memory and messages of a field on one rank."""

    work: int  # all levels with their halos
    returned: int  # levels that are results
    state: int  # levels in a checkpoint
    sent: int  # halos, in an update
    received: int


def _bytes_of(spec: FieldSpec, ranks: RankGrid, rank: int) -> _FieldBytes:
    ranks = ranks.extend(spec.extra)
    exchange = plan_halo_exchange(ranks, rank, spec.widest, planned(spec.boundary), spec.corners)
    levels, item_bytes = len(spec.depths), spec.dtype.itemsize
    results = 0 if spec.is_constant else levels
    level_bytes = prod(exchange.shape) * item_bytes
    return _FieldBytes(
        work=(levels + (not spec.is_constant)) * level_bytes,
        returned=results * level_bytes,
        state=results * prod(ranks.shape(rank)) * item_bytes,
        sent=sum(map(elements_of, exchange.sends.values())) * item_bytes,
        received=sum(map(elements_of, exchange.receives.values())) * item_bytes,
    )
