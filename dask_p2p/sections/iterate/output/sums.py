"""Records that are summed over ranks: functions whose values do not add up are refused.

A mean, a largest value or a norm of each local block would be summed as well, and the result depend
on the number of ranks. Values for halves of a block show such functions::

    sum        f(a, b) = f(a) + f(b)
    mean, max  min(f(a), f(b)) <= f(a, b) <= max(f(a), f(b))
    norm       f(a, b)**2 = f(a)**2 + f(b)**2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.iterate.functions.binding import AT, VALUES, Binding
from dask_p2p.sections.iterate.functions.replayable import is_replayable
from dask_p2p.sections.iterate.functions.writes import arrays_in
from dask_p2p.sections.iterate.output.series import SeriesSpec

_DIFFERENCE = 1e-4  # largest one of equal values, relative to them
_SMALL = 1e-2  # smallest value of a part that counts, relative to that of the other part
_ROUNDING = 1e-9  # values below, relative to the fields, may be rounding errors of a sum
_LEAST_PARTS = 2  # pairs of parts that decide
_MOST_RECORDS = 8  # that are compared: a field of zeros shows nothing


class SumChecks:
    """The records of one rank whose values have to add up."""

    def __init__(self, specs: Sequence[SeriesSpec], ctx: Context) -> None:
        is_needed = ctx.size > 1 and ctx.device.has_read_only
        self._left = [spec for spec in specs if is_needed and _is_checked(spec)]
        self._records = 0

    def __bool__(self) -> bool:
        return bool(self._left)

    def __call__(self, whole: Box, values: Callable[[Binding, Box], Mapping[str, Any]]) -> None:
        """Refuse functions whose values for parts of the local block do not add up.

        `values` returns the arguments of a function for a box of the local block.
        """
        self._records += 1
        for spec in [*self._left]:
            found = None
            with suppress(Exception):  # of functions of whole blocks
                found = _adds_up(spec, whole, values)
            if found is False:
                raise _not_additive(spec.name)
            if found or self._records == _MOST_RECORDS:
                self._left.remove(spec)


def _is_checked(spec: SeriesSpec) -> bool:
    is_sum = spec.record.op == "sum" and spec.record.shape == () and not spec.is_same
    is_pure = is_replayable(spec.record.function)
    return is_sum and is_pure and VALUES[AT] not in spec.binding.names


def _adds_up(
    spec: SeriesSpec, whole: Box, values: Callable[[Binding, Box], Mapping[str, Any]]
) -> bool | None:
    def value(box: Box) -> Any:
        return spec.binding.bound(spec.record.function, values(spec.binding, box))()

    arrays = arrays_in(values(spec.binding, whole).values(), np.ndarray)
    parts = [(value(first), value(second)) for first, second in halves(whole)]
    return adds_up(value(whole), parts, largest(arrays))


def halves(box: Box) -> Iterator[tuple[Box, Box]]:
    """Yield two parts of a box, at several positions along each axis."""
    for axis, (start, stop) in enumerate(box):
        length = stop - start
        for at in sorted({length // 2, length // 3} - {0}):
            low, high = (start, start + at), (start + at, stop)
            first, second = ((*box[:axis], part, *box[axis + 1 :]) for part in (low, high))
            yield first, second


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


def _not_additive(name: str) -> InputError:
    """Return the error for a function whose values do not add up."""
    return InputError(
        f"record[{name!r}]: expected a function whose values for parts of the array add up, as "
        f"op='sum' adds those of all ranks, got one like a mean, an extreme or a norm. Record "
        f"sums, lambda u: (u**2).sum(), or give another op, Record(function, op='max')."
    )
