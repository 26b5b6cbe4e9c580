"""Numbers that are combined over ranks: functions whose values depend on the number of ranks.

A mean, a largest value or a norm of each local block would be summed, and a sum over a halo counts
elements of neighbours again. Values for halves of a block show such functions::

    sum            f(a, b) = f(a) + f(b)
    mean, max      min(f(a), f(b)) <= f(a, b) <= max(f(a), f(b))
    norm           f(a, b)**2 = f(a)**2 + f(b)**2
    sum with halo  f(a, b) != f(a) + f(b)

Means, extremes and norms are refused. A warning names the others, and so it does for the other
operations, such as the largest mean of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from dask_p2p.errors import InputError, P2PWarning
from dask_p2p.geometry import Box, box_size, cut_box
from dask_p2p.replayable import is_replayable
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.divided import copies_of
from dask_p2p.sections.iterate.functions.binding import UNNAMED, Binding
from dask_p2p.sections.iterate.functions.writes import arrays_in
from dask_p2p.sections.iterate.output.series import OPS, SeriesSpec

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.iteration import Iteration

_DIFFERENCE = 1e-4  # largest one of equal values, relative to them
_SMALL = 1e-2  # smallest value of a part that counts, relative to that of the other part
_ROUNDING = 1e-9  # values below, relative to the fields, may be rounding errors of a sum
_NOISE = 32  # rounding errors of a sum, in units of the last place of each element
_LEAST_PARTS = 2  # pairs of parts that decide
_MOST_CALLS = 8  # that are compared: a field of zeros shows nothing
_MOST_NUMBERS = 64  # of an array, such as a histogram

#: Arguments of a function by name, for a box of the local block.
Values: TypeAlias = Callable[[Binding, Box], Mapping[str, Any]]
#: How values for parts of a block combine to that of the block; None: unknown.
Verdict: TypeAlias = Literal["combined", "mean", "other"] | None


@dataclass(frozen=True)
class Combined:
    """A function that returns numbers which are combined over ranks."""

    name: str  # in errors
    op: str  # that combines them
    remedy: str
    function: Callable[..., Any]
    binding: Binding
    numbers: Callable[[Callable[..., Any], Mapping[str, Any]], Sequence[Any]]  # of a call
    is_step: bool = False  # whether it has been called, before the first comparison

    @property
    def may_have_state(self) -> bool:
        """True if later calls of the function may depend on earlier ones."""
        return not is_replayable(self.function)

    @property
    def copies(self) -> Callable[[], Callable[..., Any]] | None:
        """A function that returns copies for further calls, for any part of the block."""
        return None if self.binding.reads_at else copies_of(self.function)


class SumChecks:
    """The functions of one rank whose numbers have to add up."""

    def __init__(self, of: Iteration, ctx: Context) -> None:
        is_compared = of.compares_parts(ctx) and ctx.device.has_read_only  # NumPy's arrays
        given = (*map(_of_record, of.series), *_of_until(of)) if is_compared else ()
        self._left = [each for each in given if each is not None]
        self._calls = 0

    def __bool__(self) -> bool:
        return bool(self._left)

    def __call__(self, whole: Box, values: Values) -> None:
        """Refuse functions whose numbers for parts of the local block do not add up.

        Warns of other functions whose numbers depend on the number of ranks. Functions that may
        have a state are compared before their first call alone: later it is that of this block.
        """
        self._calls += 1
        for each in [*self._left]:
            found: set[Verdict] = {None}
            with suppress(Exception):  # of functions of whole blocks
                found = _verdicts(each, whole, values)
            if "mean" in found and not (each.is_step and each.may_have_state):
                raise InputError(
                    f"{each.name}: expected a function whose values for parts of the array add "
                    f"up, as those of all ranks are summed, got one like a mean, an extreme, a "
                    f"norm or a sum over a halo. {each.remedy}"
                )
            if found & {"mean", "other"}:
                _warn(each)
            is_last = self._calls == _MOST_CALLS or each.may_have_state
            if "other" in found or None not in found or is_last:
                self._left.remove(each)


def _warn(of: Combined) -> None:
    """Warn in the client and in this worker."""
    from distributed import warn

    warn(
        f"{of.name}: the {of.op} of the values for halves of a local block differs from the value "
        f"for the whole block, so the result depends on the number of ranks. A halo has elements "
        f"of neighbours, which count twice: leave it out, u[1:-1].sum(). Record sums and extremes "
        f"of elements, and compute means and norms from them.",
        P2PWarning,
    )


def _of_record(spec: SeriesSpec) -> Combined | None:
    record, binding = spec.record, spec.binding
    if spec.is_same:
        return None

    def numbers(function: Callable[..., Any], values: Mapping[str, Any]) -> Sequence[Any]:
        found = np.ravel(binding.bound(function, values)())
        return [*found[:: max(1, len(found) // _MOST_NUMBERS)]]

    remedy = (
        "Record sums without the halo, lambda u: (u[1:-1]**2).sum(), or give another op, "
        "Record(function, op='max')."
    )
    name = f"record[{spec.name!r}]"
    return Combined(name, record.op, remedy, record.function, binding, numbers)


def _of_until(of: Iteration) -> list[Combined]:
    """Return the function of the only field, if it returns numbers for `until`."""
    if of.until is None or of.series:
        return []
    last, field = of.phases[-1], of.fields[0]

    def numbers(function: Callable[..., Any], values: Mapping[str, Any]) -> Sequence[Any]:
        phase = replace(last, function=function)
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
    return [Combined("until", "sum", remedy, last.function, last.binding, numbers, is_step=True)]


def _verdicts(of: Combined, whole: Box, values: Values) -> set[Verdict]:
    """Return the verdict on each number of a function."""
    if (copies := of.copies) is None:
        return {"combined"}

    def numbers(box: Box) -> Sequence[Any]:
        return of.numbers(copies(), values(of.binding, box))

    arrays = [*arrays_in(values(of.binding, whole).values(), np.ndarray)]
    scale = largest(arrays)
    noise = _NOISE * _precision(arrays) * box_size(whole) * scale
    cuts = halves(whole, _peak(arrays, whole))
    parts = [zip(numbers(first), numbers(second), strict=True) for first, second in cuts]
    pairs = zip(*parts, strict=True)
    of_whole = zip(numbers(whole), pairs, strict=True)
    return {verdict(one, own, scale, noise, of.op) for one, own in of_whole}


def halves(box: Box, peak: Sequence[int] = ()) -> Iterator[tuple[Box, Box]]:
    """Yield two parts of a box, at several positions along each axis, and at a given point."""
    for axis, (start, stop) in enumerate(box):
        length = stop - start
        for at in sorted({length // 2, length // 3, *peak[axis : axis + 1]} - {0, length}):
            yield cut_box(box, axis, at)


def _peak(arrays: Iterable[Any], whole: Box) -> list[int]:
    """Return the position of a field's largest element: a field may be zero elsewhere."""
    for each in arrays:
        if each.ndim == len(whole) and each.size and each.dtype.kind in "biufc":
            index = np.unravel_index(np.argmax(abs(each)), each.shape)
            along = zip(index, each.shape, whole, strict=True)
            return [int(n) * (stop - start) // size for n, size, (start, stop) in along]
    return []


def verdict(
    whole: Any,  # value of a block
    parts: Sequence[tuple[Any, Any]],  # values of pairs of its parts
    scale: float,  # largest value of the fields
    noise: float = 0.0,  # largest rounding error of a sum
    op: str = "sum",
) -> Verdict:
    """Return how values for parts of a block combine to that of the block."""
    values = np.array([(whole, *pair) for pair in parts], complex)
    if not len(values) or not np.isfinite(values).all() or values.imag.any():
        return None
    most = abs(values).max(axis=1)
    if op == "sum":
        is_known = (most > _ROUNDING * scale) & (abs(values[:, 1:]).min(axis=1) > _SMALL * most)
    else:
        is_known = (values != values[:, :1]).any(axis=1)
        noise = 0.0
    if is_known.sum() < _LEAST_PARTS:
        return None
    (all_, a, b), most = values.real[is_known].T, most[is_known]
    difference = abs(all_ - OPS[op](a, b))
    is_combined = difference <= _DIFFERENCE * most
    is_between = (np.minimum(a, b) <= all_) & (all_ <= np.maximum(a, b))
    is_norm = abs(all_**2 - a**2 - b**2) <= _DIFFERENCE * most**2
    if op == "sum" and (~is_combined & (is_between | is_norm)).all():
        return "mean"
    if is_combined.all():
        return "combined"
    return "other" if (difference > np.maximum(_DIFFERENCE * most, noise)).any() else None


def largest(arrays: Iterable[Any]) -> float:
    """Return the largest value of some NumPy arrays of numbers."""
    sizes = (abs(each).max() for each in arrays if each.size and each.dtype.kind in "iufc")
    return float(max(sizes, default=0))


def _precision(arrays: Iterable[Any]) -> float:
    """Return the relative precision of some NumPy arrays."""
    each = (np.finfo(array.dtype).eps for array in arrays if array.dtype.kind in "fc")
    return float(max(each, default=np.finfo(float).eps))
