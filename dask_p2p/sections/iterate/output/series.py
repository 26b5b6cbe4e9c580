"""Series of numbers that `iterate` records while it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dask_p2p.backends.base import check_plain
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.inputs import checked_choice, checked_count, checked_dtype
from dask_p2p.ops.arguments import check_function
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.redistribution import checked_shape
from dask_p2p.sections.iterate.fields import check_name
from dask_p2p.sections.iterate.functions import OUT, Bind, Binding
from dask_p2p.sections.iterate.step import Reader
from dask_p2p.types import Array, DTypeLike

#: Name of the series with the numbers of the recorded steps.
STEPS = "steps"
#: Operations that combine the numbers of all ranks.
OPS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
_BATCH = 64  # values of a rank that one message combines


@dataclass(frozen=True)
class Record:
    """A number, or an array of numbers, that `iterate` records while it runs.

    Parameters
    ----------
    function : callable
        Returns the number of one local block. Its parameters are names of fields, constants and
        keywords, and `at`, as for the function of a step. Fields have their halos, whose elements
        are those of other ranks: leave them out of sums.
    every : int, optional
        Number of steps between records, by default 1.
    op : {"sum", "prod", "min", "max"}, optional
        The operation that combines the numbers of all ranks, by default "sum". A value that all
        ranks have, such as a time, counts once. Means, extremes and norms of local blocks do not
        add up: record sums, or elements by "min" and "max".
    shape : tuple of int, optional
        Shape of the value, by default that of a number.
    dtype : dtype, optional
        Dtype of the value, by default float. An end by `until` leaves NaN in the rest of a series,
        or 0 if the dtype has no NaN.

    See Also
    --------
    iterate : Its `InputError` and `BlockMismatchError` are those of records, too.
    Save : Frames of whole fields.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_p2p import Record, iterate
    >>> halve = lambda u: {"u": u / 2}
    >>> record = {"sum": Record(lambda u: u.sum(), every=2)}
    >>> y = iterate(halve, {"u": da.ones(8)}, 0, 4, record=record)
    >>> y["sum"].compute(scheduler="sync")
    array([2. , 0.5])
    """

    function: Callable[..., Any]
    every: int = 1
    op: str = "sum"
    shape: tuple[int, ...] = ()
    dtype: DTypeLike = float


@dataclass(frozen=True)
class SeriesSpec:
    """One series: the record that makes it, and the parameters of its function."""

    name: str
    record: Record
    binding: Binding
    is_same: bool = False  # whether all ranks have the same value

    def count(self, steps: int) -> int:
        return steps // self.record.every

    def unset(self, count: int) -> Array:
        """Return a read-only array of a number of values that are not recorded."""
        record = self.record
        dtype = np.dtype(record.dtype)
        fill = np.array(np.nan if dtype.kind in "fc" else 0, dtype)
        return np.broadcast_to(fill, (count, *record.shape))

    def size_bytes(self, steps: int) -> int:
        return int(self.unset(self.count(steps)).nbytes)


def checked_series(
    record: Any,
    fields: Collection[str],
    bind: Bind,
    divided: Collection[str],  # names of the values that each rank has of its own
) -> tuple[SeriesSpec, ...]:
    """Return the specs of a mapping of records.

    Raises `InputError` for anything else than records whose parameters are such names.
    """
    if not isinstance(record, Mapping):
        raise InputError(
            f"record: expected a mapping of functions by name, got {type(record).__name__}. Give "
            f"{{'mass': lambda u: u[1:-1].sum()}}."
        )
    specs = []
    for name, value in record.items():
        check_name(name, "a record")
        if name in (*fields, STEPS):
            raise InputError(
                f"record: expected names that no field has, nor {STEPS!r}, got {name!r}. Rename it."
            )
        options = value if isinstance(value, Record) else Record(value)
        check_function(options.function, "fields", "record={'mass': lambda u: u[1:-1].sum()}")
        checked_count("steps between records", every=options.every)
        dtype = checked_dtype("dtype of a record", options.dtype)
        shape, (function, binding) = checked_shape(options.shape), bind(options.function)
        checked_choice(f"op of the record {name!r}", options.op, OPS)
        if binding.fills_out:
            raise InputError(
                f"record: expected a function without a parameter {OUT}, got {name!r}. Return the "
                f"number."
            )
        is_same = not binding.reads_at and binding.names.isdisjoint(divided)
        options = replace(options, function=function, shape=shape, dtype=dtype)
        specs.append(SeriesSpec(name, options, binding, is_same))
    return tuple(specs)


class Series:
    """All series of one rank: they grow, since a run may end long before its last step."""

    def __init__(self, specs: Sequence[SeriesSpec], steps: int, ctx: Context) -> None:
        self._specs, self._steps, self._ctx = specs, steps, ctx
        self._readers = {spec.name: Reader(ctx.device, spec.record.function) for spec in specs}
        self.last: dict[str, Any] = {}  # the newest values, of all ranks
        #: By name: consecutive parts of the combined values; values of this rank alone.
        self._combined: dict[str, list[Array]] = {spec.name: [spec.unset(0)] for spec in specs}
        self._pending: dict[str, list[Array]] = {spec.name: [] for spec in specs}

    @property
    def names(self) -> set[str]:
        return set().union(*(spec.binding.names for spec in self._specs))

    @property
    def kinds(self) -> dict[str, Any]:
        """The steps between values, and the shape and dtype of a value, of each series."""
        records = {spec.name: spec.record for spec in self._specs}
        return {
            name: [record.every, list(record.shape), np.dtype(record.dtype).str]
            for name, record in records.items()
        }

    def record(self, step: int, values: Callable[[Binding], Mapping[str, Any]]) -> None:
        """Call the functions that are due; `values` returns the arguments of one of them."""
        for spec in self._specs:
            if step % spec.record.every == 0:
                function = spec.binding.bind(spec.record.function, values(spec.binding))
                value = self._checked(spec, self._readers[spec.name](function))
                self._pending[spec.name].append(value)
        if any(len(pending) >= _BATCH for pending in self._pending.values()):
            self.combine()

    def _checked(self, spec: SeriesSpec, value: Any) -> Array:
        """Return this rank's value; one that all ranks have, such as a time, counts once."""
        check_plain(f"record[{spec.name!r}]", value)
        array: Array = np.asarray(self._ctx.device.to_host(value))
        shape, dtype = tuple(spec.record.shape), np.dtype(spec.record.dtype)
        if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise BlockMismatchError(
                f"expected a value of shape {shape} that becomes {dtype} from the record "
                f"{spec.name!r}, got {array.shape} {array.dtype}. Give its shape and dtype, "
                f"Record(function, shape=..., dtype=...)."
            )
        nothing = {"sum": 0, "prod": 1}.get(spec.record.op)
        if spec.is_same and self._ctx.rank and nothing is not None:
            return np.full(shape, nothing, dtype)
        return array.astype(dtype)

    def combine(self) -> None:
        """Combine the values that ranks have recorded since the last call."""
        for spec in self._specs:
            if pending := self._pending[spec.name]:
                combined = self._ctx.allreduce(np.stack(pending), spec.record.op)
                self._combined[spec.name].append(combined)
                self.last[spec.name] = combined[-1]
                pending.clear()

    @property
    def values(self) -> dict[str, Array]:
        """The combined values of each series."""
        for parts in self._combined.values():
            if len(parts) > 1:
                parts[:] = [np.concatenate(parts)]
        return {name: values for name, (values,) in self._combined.items()}

    def resume(self, values: Mapping[str, Array], step: int) -> None:
        """Take over the series of an earlier run, which has made a number of steps."""
        for spec in self._specs:
            series = spec.unset(spec.count(step))
            if len(series) and spec.name in values:
                series = values[spec.name][: len(series)].copy()
                self.last[spec.name] = series[-1]
            self._combined[spec.name] = [series]

    def results(self) -> dict[str, Array]:
        """Return all series by name, as long as those of all steps."""
        self.combine()
        return {
            spec.name: np.concatenate([values, spec.unset(spec.count(self._steps) - len(values))])
            for spec, values in zip(self._specs, self.values.values(), strict=True)
        }
