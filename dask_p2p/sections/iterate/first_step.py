"""Checks of the function of `iterate`, made in its first step.

Each check finds a program that would return wrong values without an error: a function that leaves
elements unset, writes into its fields, loses fractions, or reads corners that are not exchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from dask.utils import funcname

from dask_p2p.backends.base import unread_value
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.geometry import Box
from dask_p2p.sections.checks import Comparison, FunctionCopies, PositionWatch, watched
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.halo import HaloArray, HaloPart
from dask_p2p.sections.iterate.functions import OUT, UNNAMED, Binding
from dask_p2p.sections.iterate.iteration import Iteration
from dask_p2p.sections.iterate.local_fields import LocalFields
from dask_p2p.sections.iterate.step import (
    Call,
    Outs,
    Phase,
    Returned,
    arrays_in,
    can_refuse,
    check_kept,
    written_fields,
)
from dask_p2p.types import Array, DType

logger = logging.getLogger(__name__)

_MARKS = (b"\xa5", b"\x5a")  # bytes of unset elements: data may equal one of the marks
_SEED = 0xA5A5A5A5  # of the zeros and ones that mark an unset corner
_CORNER = 64  # elements along each axis
#: Kinds of dtypes whose writes are checked. Complex dtypes hold all numbers.
_STRICT_KINDS = "biuf"
_LEAST_MARKED = 64  # fewest zeros and ones that hardly occur by chance
#: Arguments of a function by name, for a box of the local block.
Values: TypeAlias = Callable[[Binding, Box], Mapping[str, Any]]
_STATE = (
    "iterate saves no checkpoints in memory: expected functions that depend on their arguments "
    "alone, got one that keeps values from step to step. Give such a value as a field, "
    "{'u': u, 't': 0.0}, and return it."
)
_REMEDY = (
    "Means, norms and sums over its argument are those of one local block: compute them of the "
    "whole array, by record= and at.last, or by spmd and ctx.allreduce. A function that reads more "
    "neighbours than depth= gives it returns such values, too. So does one that draws random "
    "numbers, the same on each rank: seed them by np.random.default_rng((seed, at.step, at.rank))."
)


class FirstStep:
    """The first call of a phase, for a whole local block.

    Parameters
    ----------
    phase : Phase
        Calls the user's function.
    device : Host
        Device of the local block.
    fields : sequence of HaloArray
        The fields that the function reads.
    values : mapping
        Its arguments by name: the data of the fields, constants and keywords.
    parts : mapping of str to HaloPart
        The data of the newest level of each field, as the function receives it.
    spare : callable
        Returns the memory of a field's next values, by its name.
    """

    def __init__(
        self,
        phase: Phase,
        device: Host,
        fields: Sequence[HaloArray],
        values: Mapping[str, Any],
        parts: Mapping[str, HaloPart],
        next_level: Callable[[str], HaloArray],
    ) -> None:
        self._phase, self._device, self._fields = phase, device, fields
        self._values, self._parts, self._next_level = values, parts, next_level
        self._arrays = [*arrays_in(values.values(), device.module.ndarray)]
        self._names: list[str] = []  # of the fields that the function changes

    def __call__(self) -> tuple[list[str], Returned]:
        """Call the function; return the names of changed fields, and its other values.

        Raises
        ------
        BlockMismatchError
            If the function leaves elements unset, or fills in numbers of another kind.
        InputError
            If it writes into its fields, or reads corners that are not exchanged.
        """
        before = self._sums()
        returned = self._filled() if self._phase.fills_out else self._fill_blocks()
        if self._sums() != before:
            raise written_fields()
        if any(field.layout.halo.unread for field in self._fields):
            self._check_corners()
        return self._names, returned._replace(blocks={})  # perhaps views of fields

    def _fill_blocks(self) -> Returned:
        """Call the function and keep the new blocks; return all that it returns."""
        outs = self._outs if self._phase.fills_out else _Outs(self._next_level)
        returned = self._phase.fill(self._device, self._values, outs, self._parts)
        self._names = [*outs]
        return returned

    def _sums(self) -> list[int]:
        """Return checksums of the arguments that the function could write into."""
        if can_refuse(self._device, self._phase.function):
            return []
        return [self._device.checksum(array) for array in self._arrays]

    @property
    def _outs(self) -> dict[str, Array]:
        return {name: self._next_level(name).inner for name in self._names}

    def _filled(self) -> Returned:
        """Call the function, and check that it fills all memory of its parameter `out`."""
        self._names = [*self._phase.fields]
        outs = self._outs
        marks = [marked(out, self._device, out_name(name)) for name, out in outs.items()]
        returned = self._recorded(outs)
        unset_marks = [mark for mark in marks if mark is not None and mark.is_left()]
        if unset_marks:
            for mark in unset_marks:
                mark.put_others()  # data may equal the first marks
            self._phase.call(self._values, outs)
            for mark in unset_marks:
                mark.check()
        return self._phase.filled(returned, outs)

    # --- numbers of the fields' kind

    def _recorded(self, outs: Outs) -> Any:
        """Call the function, if possible with views of `outs` that refuse lossy writes."""
        views = {
            name: strict_view(out, self._device.module)
            for name, out in outs.items()
            if out.dtype.kind in _STRICT_KINDS
        }
        returned, is_strict = None, bool(views)
        if is_strict:
            try:
                returned = self._phase.call(self._values, {**outs, **views})
            except (BlockMismatchError, InputError):
                raise
            except Exception:  # a compiled function takes plain arrays only
                is_strict = False
        for name in outs:
            if not (is_strict and name in views and views[name].memory.is_written):
                self._check_wider(name, outs)
        return returned if is_strict else self._phase.call(self._values, outs)

    def _check_wider(self, name: str, outs: Outs) -> None:
        """Refuse a function that fills fractions into an array that cannot hold them."""
        out = outs[name]
        if out.dtype.kind not in "biu":
            return
        wide = self._device.zeros(out.shape, np.float64 if out.dtype.itemsize > 2 else np.float32)
        try:
            self._phase.call(self._values, {**outs, name: wide})
        except Exception:  # it fills integers only
            return
        module = self._device.module
        lost = int(module.count_nonzero(wide != module.floor(wide)))
        if lost:
            raise BlockMismatchError(
                f"expected a function that fills its parameter out with values of {out.dtype}, got "
                f"one that fills {lost} of {out.size} elements with fractions. Give the dtype of "
                f"the fields, iterate(..., dtype=float), or round the values."
            )

    # --- no corners

    def _check_corners(self) -> None:
        """Refuse a function whose results change with corners that are not exchanged."""
        expected = self._results()
        of_dtypes = {field.layout.dtype: fillings(field.layout.dtype) for field in self._fields}
        test_count = max(map(len, of_dtypes.values()))
        tests = [
            {
                t: test_values[n % len(test_values)]
                for t, test_values in of_dtypes.items()
                if test_values
            }
            for n in range(test_count)
        ]
        with np.errstate(all="ignore"):
            has_changed = any(self._results_with(test) != expected for test in tests)
        # Results that differ even for the same corners come from random numbers.
        if has_changed and self._results_with({}) == expected:
            raise InputError(
                "corners=False: expected a function that reads no corners of the halo, where two "
                "axes' halos meet, got one whose results change with them. Leave corners=False out."
            )
        self._fill({})

    def _results_with(self, values: Mapping[DType, Any]) -> list[int]:
        """Call the function with values in all corners, by dtype; return its results' checksums."""
        self._fill(values)
        self._fill_blocks()
        return self._results()

    def _fill(self, values: Mapping[DType, Any]) -> None:
        for field in self._fields:
            dtype = field.layout.dtype
            field.fill_unread(values.get(dtype, unread_value(dtype)))

    def _results(self) -> list[int]:
        return [self._device.checksum(self._next_level(name).data) for name in self._names]


class StepComparisons:
    """Comparisons of the functions of one rank of `iterate` with parts of its local block.

    Attributes
    ----------
    are_due : bool
        Whether the next call of a function in a step is compared.
    """

    def __init__(self, iteration: Iteration, ctx: Context, local: LocalFields) -> None:
        self._device, self._local = ctx.device, local
        is_divided = [n > 1 and not iteration.is_staggered for n in ctx.grid]
        box = next(iter(local.fields.values())).layout.whole
        self._comparisons = {
            id(phase): Comparison(
                f"iterate: {_name(phase.function)}",
                "a local block",
                _REMEDY,
                box,
                is_divided,
                [phase.function, local.keywords],
                ctx.device.module,
            )
            for phase in iteration.phases
        }
        self.are_due = any(map(bool, self._comparisons.values()))
        self._ctx, self._functions, self._is_named = ctx, iteration.functions, False
        has_states = iteration.period is not None and ctx.size > 1
        #: Digest of the functions before their first call; empty without checkpoints.
        self._digest = self._present_digest() if has_states else b""

    def _present_digest(self) -> bytes:
        return FunctionCopies(self._functions, self._local.keywords).digest()

    def keep_values(self) -> bool:
        """Return whether functions of any rank have changed. A collective call of all ranks.

        Checkpoints have no such values, so ranks would resume with the first ones.
        """
        digest = self._present_digest() if self._digest else b""
        # Some functions have another pickle each time: those show no change.
        is_changed = digest != self._digest and digest == self._present_digest()
        keep_values = bool(self._ctx.allreduce(is_changed, "any"))
        if keep_values and not self._is_named and self._ctx.rank == 0:
            logger.warning(_STATE)
        self._is_named = keep_values
        return keep_values

    def step(self, call: Call, values: Values, apply: Callable[[], Returned]) -> Returned:
        """Make a call of a step for the whole local block, and compare it."""
        comparison, fields = self._comparisons[id(call.phase)], self._local.fields

        def compute(copies: tuple[Any, ...], box: Box, watch: PositionWatch) -> list[Array]:
            function, keywords = copies
            parts = {name: fields[name].parts(box)[0] for name in call.changed}
            outs = {
                name: self._device.empty(part.data[part.inner].shape, part.data.dtype)
                for name, part in parts.items()
            }
            arguments = watched({**values(call.phase.binding, box), **keywords}, watch)
            replace(call.phase, function=function).fill(self._device, arguments, outs, parts)
            return [*outs.values()]

        def blocks(_: Returned) -> list[Array]:
            return [fields[name].next_level.inner for name in call.changed]

        read = [field.newest.inner for field in fields.values()]
        returned = comparison(compute, apply, blocks, read) if comparison else apply()
        self.are_due = any(map(bool, self._comparisons.values()))
        return returned


def _name(function: Any) -> str:
    """Return the name of a function; that of its class for other objects, without an address."""
    name = funcname(function)
    return type(function).__name__ if name.startswith("<") and " at 0x" in name else name


class _Outs(dict[str, Array]):
    """The memory of those fields that a function returns."""

    def __init__(self, next_level: Callable[[str], HaloArray]) -> None:
        super().__init__()
        self._next_level = next_level

    def __missing__(self, name: str) -> Array:
        self[name] = self._next_level(name).inner
        return self[name]


@dataclass
class _StrictMemory:
    array: Array
    is_written: bool = False  # by an assignment to a strict view


class _Strict:
    """Mixin of array classes: views that refuse lossy assignments to their memory."""

    module: Any  # array module: numpy or cupy
    memory: Any

    def __array_finalize__(self, obj: Any) -> None:
        self.memory = getattr(obj, "memory", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        view: Any = self
        memory = self.memory
        if memory is not None and self.module.may_share_memory(view, memory.array):  # no copy
            check_kept(value, view.dtype, "assign")
            memory.is_written = True
        super().__setitem__(key, value)  # type: ignore[misc]

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...] = (), **kwargs: Any
    ) -> Any:
        """Call a ufunc, which refuses lossy casts itself, with plain arrays."""
        if out:
            kwargs["out"] = tuple(map(_plain, out))
            for target in out:
                if isinstance(target, _Strict):
                    target.memory.is_written = True
        values = getattr(ufunc, method)(*map(_plain, inputs), **kwargs)
        return out[0] if len(out) == 1 else values


def _plain(value: Any) -> Any:
    array: Any = value
    return array.view(type=value.module.ndarray) if isinstance(value, _Strict) else value


def strict_view(array: Array, module: Any) -> Any:
    """Return a view of an array that refuses fractions and imaginary parts that it cannot hold."""
    view = array.view(type=_strict_class(module))
    view.memory = _StrictMemory(array)
    return view


@cache
def _strict_class(module: Any) -> type:
    return type("Strict", (_Strict, module.ndarray), {"module": module})


def out_name(name: str) -> str:
    """Return the expression for the memory of a field in a function."""
    return OUT if name == UNNAMED else f"{OUT}.{name}"


def fillings(dtype: DType) -> list[Any]:
    """Return test values for corners: a function that reads corners notices one of them."""
    if dtype.kind in "fc":
        return [dtype.type(1), dtype.type(np.inf), dtype.type(-np.inf)]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return [dtype.type(value) for value in (1, 2, limits.max, limits.min)]
    ones = np.frombuffer(b"\1" * dtype.itemsize, dtype)[0] if dtype.itemsize else None
    return [] if ones is None or dtype.kind == "U" else [ones]


class _Values:
    """Marks of unset elements: one value that no function writes by accident."""

    def __init__(self, out: Array, device: Host, name: str) -> None:
        self._out, self._device, self._name = out, device, name
        self._mark, self._second_mark = (
            np.frombuffer(byte * out.dtype.itemsize, out.dtype)[0] for byte in _MARKS
        )
        self._unset: Any = None  # elements that had the first mark
        out[...] = self._mark

    def is_left(self) -> bool:
        return self._count(self._out == self._mark) > 0

    def put_others(self) -> None:
        self._unset = self._out == self._mark
        self._out[self._unset] = self._second_mark

    def check(self) -> None:
        if unset_count := self._count(self._unset & (self._out == self._second_mark)):
            raise _unfilled(self._name, self._out, unset_count)

    def _count(self, chosen: Array) -> int:
        return int(self._device.module.count_nonzero(chosen))


class _Pattern:
    """Marks of small elements: a pattern of zeros and ones in a corner.

    A function may write each of these values, but hardly the whole pattern.
    """

    def __init__(self, out: Array, device: Host, name: str) -> None:
        self._out, self._device, self._name = out, device, name
        self._corner = out[(slice(_CORNER),) * out.ndim]
        draw = np.random.default_rng(_SEED)
        self._marks = draw.integers(0, 2, self._corner.shape).astype(out.dtype)
        device.copy_from_host(self._corner, self._marks)

    def is_left(self) -> bool:
        return np.array_equal(self._device.to_host(self._corner), self._marks)

    def put_others(self) -> None:
        self._marks = 1 - self._marks if self._marks.dtype != bool else ~self._marks
        self._device.copy_from_host(self._corner, self._marks)

    def check(self) -> None:
        if self.is_left():
            raise _unfilled(self._name, self._out, self._corner.size)


def marked(out: Array, device: Host, name: str = OUT) -> _Values | _Pattern | None:
    """Put marks into memory that the function must fill; None if its dtype or size allows none."""
    if out.dtype.kind not in "biufcmM":
        return None
    if out.dtype.itemsize >= 4:
        return _Values(out, device, name)
    is_enough = np.prod([min(size, _CORNER) for size in out.shape]) >= _LEAST_MARKED
    return _Pattern(out, device, name) if is_enough else None


def _unfilled(name: str, out: Array, unset_count: int) -> BlockMismatchError:
    return BlockMismatchError(
        f"expected the function to fill its parameter {name}, of shape {out.shape}, but it left "
        f"{unset_count} of {out.size} elements as they were. Write to all of them, "
        f"{name}[...] = ..."
    )
