"""Numbers that are summed over ranks: functions whose values do not add up are refused.

A mean, a largest value or a norm of each local block would be summed as well, and the result depend
on the number of ranks. Values for halves of a block show such functions::

    sum        f(a, b) = f(a) + f(b)
    mean, max  min(f(a), f(b)) <= f(a, b) <= max(f(a), f(b))
    norm       f(a, b)**2 = f(a)**2 + f(b)**2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, cut_box
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.iterate.functions.binding import AT, UNNAMED, VALUES, Binding
from dask_p2p.sections.iterate.functions.replayable import is_replayable
from dask_p2p.sections.iterate.functions.writes import arrays_in
from dask_p2p.sections.iterate.output.series import SeriesSpec

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.iteration import Iteration

_DIFFERENCE = 1e-4  # largest one of equal values, relative to them
_SMALL = 1e-2  # smallest value of a part that counts, relative to that of the other part
_ROUNDING = 1e-9  # values below, relative to the fields, may be rounding errors of a sum
_LEAST_PARTS = 2  # pairs of parts that decide
_MOST_CALLS = 8  # that are compared: a field of zeros shows nothing


#: Arguments of a function by name, for a box of the local block.
Values: TypeAlias = Callable[[Binding, Box], Mapping[str, Any]]


@dataclass(frozen=True)
class Summed:
    """A function that returns numbers which are summed over ranks."""

    name: str  # in errors
    remedy: str
    function: Callable[..., Any]
    binding: Binding
    numbers: Callable[[Mapping[str, Any]], Sequence[Any]]  # of the function with its arguments

    @property
    def is_known(self) -> bool:
        """True if its code shows that further calls change nothing, for any part of the block."""
        return is_replayable(self.function) and VALUES[AT] not in self.binding.names


class SumChecks:
    """The functions of one rank whose numbers have to add up."""

    def __init__(self, of: Iteration, ctx: Context) -> None:
        summed = (*map(_of_record, of.series), *_of_until(of)) if of.compares_parts(ctx) else ()
        self._left = [each for each in summed if each is not None and each.is_known]
        self._calls = 0

    def __bool__(self) -> bool:
        return bool(self._left)

    def __call__(self, whole: Box, values: Values) -> None:
        """Refuse functions whose numbers for parts of the local block do not add up."""
        self._calls += 1
        for each in [*self._left]:
            found: set[bool | None] = {None}
            with suppress(Exception):  # of functions of whole blocks
                found = _adds_up(each, whole, values)
            if False in found:
                raise InputError(
                    f"{each.name}: expected a function whose values for parts of the array add "
                    f"up, as those of all ranks are summed, got one like a mean, an extreme or a "
                    f"norm. {each.remedy}"
                )
            if None not in found or self._calls == _MOST_CALLS:
                self._left.remove(each)


def _of_record(spec: SeriesSpec) -> Summed | None:
    record, binding = spec.record, spec.binding
    if record.op != "sum" or record.shape != () or spec.is_same:
        return None

    def numbers(values: Mapping[str, Any]) -> Sequence[Any]:
        return (binding.bound(record.function, values)(),)

    remedy = "Record sums, lambda u: (u**2).sum(), or give another op, Record(function, op='max')."
    return Summed(f"record[{spec.name!r}]", remedy, record.function, binding, numbers)


def _of_until(of: Iteration) -> list[Summed]:
    """Return the function of the only field, if it returns numbers for `until`."""
    if of.until is None or of.series:
        return []
    phase, field = of.phases[-1], of.fields[0]

    def numbers(values: Mapping[str, Any]) -> Sequence[Any]:
        newest = next(arrays_in((values[UNNAMED],), np.ndarray))
        halo = (sum(sides) for sides in field.depths[0])
        out = np.empty([n - more for n, more in zip(newest.shape, halo, strict=True)], field.dtype)
        outs = {UNNAMED: out} if phase.fills_out else {}
        value = phase.call(values, outs)
        return (phase.filled(value, outs) if phase.fills_out else phase.returned(value)).numbers

    remedy = (
        "Return sums, (change**2).sum(). Or give the field by name, and record the number: "
        "record={'change': Record(function, op='max')}."
    )
    return [Summed("until", remedy, phase.function, phase.binding, numbers)]


def _adds_up(of: Summed, whole: Box, values: Values) -> set[bool | None]:
    """Return whether each number adds up."""

    def numbers(box: Box) -> Sequence[Any]:
        return of.numbers(values(of.binding, box))

    scale = largest(arrays_in(values(of.binding, whole).values(), np.ndarray))
    parts = [zip(numbers(first), numbers(second), strict=True) for first, second in halves(whole)]
    pairs = zip(*parts, strict=True)
    return {adds_up(one, own, scale) for one, own in zip(numbers(whole), pairs, strict=True)}


def halves(box: Box) -> Iterator[tuple[Box, Box]]:
    """Yield two parts of a box, at several positions along each axis."""
    for axis, (start, stop) in enumerate(box):
        length = stop - start
        for at in sorted({length // 2, length // 3} - {0}):
            yield cut_box(box, axis, at)


def adds_up(whole: Any, parts: Sequence[tuple[Any, Any]], scale: float) -> bool | None:
    """Return whether values for parts of a block add up to that of the block; None: unknown.

    `scale` is the largest value of the fields.
    """
    values = np.array([(whole, *pair) for pair in parts], complex)
    if not len(values) or not np.isfinite(values).all() or values.imag.any():
        return None
    most, least = abs(values).max(axis=1), abs(values[:, 1:]).min(axis=1)
    is_known = (most > _ROUNDING * scale) & (least > _SMALL * most)
    if is_known.sum() < _LEAST_PARTS:
        return None
    (all_, a, b), most = values.real[is_known].T, most[is_known]
    is_sum = abs(all_ - a - b) <= _DIFFERENCE * most
    is_between = (np.minimum(a, b) <= all_) & (all_ <= np.maximum(a, b))
    is_norm = abs(all_**2 - a**2 - b**2) <= _DIFFERENCE * most**2
    if (~is_sum & (is_between | is_norm)).all():
        return False
    return True if is_sum.all() else None


def largest(arrays: Iterable[Any]) -> float:
    """Return the largest value of some NumPy arrays of numbers."""
    sizes = (abs(each).max() for each in arrays if each.size and each.dtype.kind in "iufc")
    return float(max(sizes, default=0))
