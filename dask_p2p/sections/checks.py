"""Checks of users' functions in the first steps of `iterate`: `StepChecks` is their one hook.

The first call of a function shows elements that it leaves unset, lost fractions, writes into fields
and reads of corners that are not exchanged: these are errors. The next calls are compared with
calls for a part of the block: a warning names functions that depend on the number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from dask.utils import funcname

from dask_p2p.backends.base import check_plain, unread_value
from dask_p2p.backends.dlpack import LibraryFunction
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.geometry import Box
from dask_p2p.sections.comparison import Comparison, Watch, contents_digest, watch_positions
from dask_p2p.types import Array, DType

logger = logging.getLogger(__name__)

_MARKS = (b"\xa5", b"\x5a")  # bytes of unset elements: data may equal one of the marks
_LARGE_BYTES = 4  # of elements that have one mark; a pattern marks smaller ones
_SEED = 0xA5A5A5A5  # of the zeros and ones of that pattern
_CORNER = 64  # elements along each axis
#: Kinds of dtypes whose writes are checked. Complex dtypes hold all numbers.
_STRICT_KINDS = "biuf"
_LEAST_MARKED = 64  # fewest zeros and ones that hardly occur by chance
#: Arguments of a function by name, from its binding, for a box of the local block.
Values: TypeAlias = Callable[[Any, Box], Mapping[str, Any]]
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


class StepChecks:
    """The checks of the functions of one rank of `iterate`, in its first steps."""

    def __init__(self, iteration: Any, ctx: Any, local: Any) -> None:
        self._device, self._local = ctx.device, local
        is_divided = [n > 1 and not iteration.is_staggered for n in ctx.grid]
        self._box = box = next(iter(local.fields.values())).layout.local_box
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
        #: Whether the next call of a function in a step is compared.
        self.are_due = any(map(bool, self._comparisons.values()))

    def first_call(self, phase: Any, values: Mapping[str, Any]) -> tuple[list[str], Any]:
        """Call a function for the whole local block; return the names of changed fields.

        Returns its other values, too. Raises `BlockMismatchError` if the function leaves elements
        unset, or fills in numbers of another kind. Raises `InputError` if it writes into its
        fields, or reads corners that are not exchanged.
        """
        fields = self._local.fields
        read = [
            level for name in fields if name in phase.binding.names for level in fields[name].levels
        ]
        parts = {name: fields[name].parts(self._box)[0] for name in phase.fields}
        return _FirstCall(phase, self._device, read, values, parts, _NextLevels(fields))()

    def compare(self, call: Any, values: Values, apply: Callable[[], Any]) -> Any:
        """Make a call of a step for the whole local block, and compare it."""
        comparison, fields = self._comparisons[id(call.phase)], self._local.fields

        def compute(copies: tuple[Any, ...], box: Box, watch: Watch) -> list[Array]:
            function, keywords = copies
            parts = {name: fields[name].parts(box)[0] for name in call.changed}
            outs = {
                name: self._device.empty(part.data[part.inner].shape, part.data.dtype)
                for name, part in parts.items()
            }
            arguments = watch_positions({**values(call.phase.binding, box), **keywords}, watch)
            replace(call.phase, function=function).fill(self._device, arguments, outs, parts)
            return [*outs.values()]

        def blocks(_: Any) -> list[Array]:
            return [fields[name].next_level.inner for name in call.changed]

        read = [field.newest.inner for field in fields.values()]
        returned = comparison(compute, apply, blocks, read) if comparison else apply()
        self.are_due = any(map(bool, self._comparisons.values()))
        return returned


class ValueKeeping:
    """Finds functions that keep values from step to step, outside of their fields.

    Checkpoints have no such values, so ranks would resume with the first ones.
    """

    def __init__(self, iteration: Any, ctx: Any, keywords: Mapping[str, Any]) -> None:
        self._ctx, self._functions, self._keywords = ctx, iteration.functions, keywords
        has_states = iteration.period is not None and ctx.size > 1
        #: Digest of the functions before their first call; empty without checkpoints.
        self._digest = self._present_digest() if has_states else b""
        self._has_warned = False

    def check(self) -> bool:
        """Return whether functions of any rank have changed. A collective call of all ranks."""
        digest = self._present_digest() if self._digest else b""
        # Some functions have another pickle each time: those show no change.
        is_changed = digest != self._digest and digest == self._present_digest()
        keep_values = bool(self._ctx.allreduce(is_changed, "any"))
        if keep_values and not self._has_warned and self._ctx.rank == 0:
            logger.warning(_STATE)
        self._has_warned = keep_values
        return keep_values

    def _present_digest(self) -> bytes:
        return contents_digest((self._functions, self._keywords), self._ctx.device)


def check_call(
    phase: Any,
    device: Any,
    values: Mapping[str, Any],
    parts: Mapping[str, Any],  # by field: its newest level, as the function receives it
    outs: Mapping[str, Array],  # by field: the memory of its next values
) -> list[str]:
    """Call a function for a region; check it and return names as `StepChecks.first_call` does."""
    return _FirstCall(phase, device, (), values, parts, outs)()[0]


def _name(function: Any) -> str:
    name = funcname(function)
    return type(function).__name__ if name.startswith("<") and " at 0x" in name else name


class _FirstCall:
    """The first call of a function, for a whole local block."""

    def __init__(
        self,
        phase: Any,  # the function: a `Phase`
        device: Any,  # of the local block
        fields: Sequence[Any],  # halo arrays that the function reads
        values: Mapping[str, Any],  # its arguments by name
        parts: Mapping[str, Any],  # by field: its newest level, as the function receives it
        outs: Mapping[str, Array],  # by field: the memory of its next values
    ) -> None:
        self._phase, self._device, self._fields = phase, device, fields
        self._values, self._parts, self._outs = values, parts, outs
        self._names: list[str] = []  # of the fields that the function changes

    def __call__(self) -> tuple[list[str], Any]:
        """Call the function; return the names of changed fields, and its other values."""
        is_refused = can_refuse(self._device, self._phase.function)
        with refuse_writes(self._device, () if is_refused else self._values.values()):
            returned = self._fill_out() if self._phase.fills_out else self._fill_blocks()
        if any(field.layout.halo.unread for field in self._fields):
            self._check_corners()
        return self._names, returned._replace(blocks={})  # perhaps views of fields

    def _fill_blocks(self) -> Any:
        fills_out = self._phase.fills_out
        outs = {name: self._outs[name] for name in self._names} if fills_out else self._outs
        returned = self._phase.fill(self._device, self._values, outs, self._parts)
        if not fills_out:
            self._names = [*returned.blocks]
        return returned

    def _fill_out(self) -> Any:
        """Call the function, and check that it fills all memory of its parameter `out`."""
        outs = {name: self._outs[name] for name in self._phase.fields}
        self._names = [*outs]
        marks = [_Marks(out, self._device, name) for name, out in outs.items() if _Marks.fit(out)]
        returned = self._call_strictly(outs)
        marks = [mark for mark in marks if mark.find_unset()]
        if marks:  # data may equal the first marks
            for mark in marks:
                mark.put_others()
            self._phase.call(self._values, outs)
            for mark in marks:
                mark.check()
        return self._phase.read_filled(returned, outs)

    # --- numbers of the fields' kind

    def _call_strictly(self, outs: Mapping[str, Array]) -> Any:
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

    def _check_wider(self, name: str, outs: Mapping[str, Array]) -> None:
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
        values = {field.layout.dtype: corner_values(field.layout.dtype) for field in self._fields}
        tests = [
            {dtype: fill[number % len(fill)] for dtype, fill in values.items() if fill}
            for number in range(max(map(len, values.values())))
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
        self._fill(values)
        self._fill_blocks()
        return self._results()

    def _fill(self, values: Mapping[DType, Any]) -> None:
        for field in self._fields:
            dtype = field.layout.dtype
            field.fill_unread(values.get(dtype, unread_value(dtype)))

    def _results(self) -> list[int]:
        return [self._device.checksum(self._outs[name]) for name in self._names]


class _NextLevels(dict[str, Array]):
    """The memory of the next values of fields, which is made for those that a function changes."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__()
        self._fields = fields

    def __missing__(self, name: str) -> Array:
        self[name] = self._fields[name].next_level.inner
        return self[name]


class _Marks:
    """Values in memory that a function must fill, which it hardly writes by accident.

    Elements of four bytes and more have one value. Smaller ones have a pattern of zeros and ones in
    a corner: a function may write each of these values, but hardly the whole pattern.
    """

    def __init__(self, out: Array, device: Any, name: str) -> None:
        self._device, self._out = device, out
        self._name = f"out.{name}" if name else "out"
        self._unset: Any = None  # which elements have their marks
        self._is_pattern = out.dtype.itemsize < _LARGE_BYTES
        if self._is_pattern:
            self._corner = out[(slice(_CORNER),) * out.ndim]
            draw = np.random.default_rng(_SEED).integers(0, 2, self._corner.shape)
            self._marks = [draw.astype(out.dtype), (1 - draw).astype(out.dtype)]
            device.copy_from_host(self._corner, self._marks[0])
        else:
            size = out.dtype.itemsize
            self._marks = [np.frombuffer(byte * size, out.dtype)[0] for byte in _MARKS]
            out[...] = self._marks[0]

    @staticmethod
    def fit(out: Array) -> bool:
        """Return whether the dtype and size of an array allow marks."""
        is_large = out.dtype.itemsize >= _LARGE_BYTES
        sizes = [min(size, _CORNER) for size in out.shape]
        return out.dtype.kind in "biufcmM" and (is_large or np.prod(sizes) >= _LEAST_MARKED)

    def find_unset(self, number: int = 0) -> int:
        """Find the elements that have a mark; return their number, of a pattern all or none."""
        mark = self._marks[number]
        if self._is_pattern:
            is_unset = np.array_equal(self._device.to_host(self._corner), mark)
            return self._corner.size if is_unset else 0
        is_mark = self._out == mark
        self._unset = is_mark if number == 0 else self._unset & is_mark
        return int(self._device.module.count_nonzero(self._unset))

    def put_others(self) -> None:
        """Put the other marks in the places of the first ones."""
        if self._is_pattern:
            self._device.copy_from_host(self._corner, self._marks[1])
        else:
            self._out[self._unset] = self._marks[1]

    def check(self) -> None:
        """Raise `BlockMismatchError` for elements that have kept both marks."""
        if count := self.find_unset(1):
            raise BlockMismatchError(
                f"expected the function to fill its parameter {self._name}, of shape "
                f"{self._out.shape}, but it left {count} of {self._out.size} elements as they "
                f"were. Write to all of them, {self._name}[...] = ..."
            )


def corner_values(dtype: DType) -> list[Any]:
    """Return test values for corners: a function that reads corners notices one of them."""
    if dtype.kind in "fc":
        return [dtype.type(1), dtype.type(np.inf), dtype.type(-np.inf)]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return [dtype.type(value) for value in (1, 2, limits.max, limits.min)]
    ones = np.frombuffer(b"\1" * dtype.itemsize, dtype)[0] if dtype.itemsize else None
    return [] if ones is None or dtype.kind == "U" else [ones]


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


def check_kept(value: Any, dtype: DType, verb: str) -> None:
    """Raise `BlockMismatchError` if values lose fractions or imaginary parts in a dtype.

    Raises `UnsupportedArrayError` if they are more than their elements.
    """
    check_plain("the value of the function", value)
    if not is_kept(value, dtype):
        raise BlockMismatchError(
            f"expected an array from the function that can be converted to {dtype} without loss, "
            f"got {np.asarray(value).dtype if np.isscalar(value) else value.dtype}. Give the dtype "
            f"of the fields, iterate(..., dtype=...), or {verb} values of {dtype}, a.astype(...)."
        )


def is_kept(value: Any, dtype: DType) -> bool:
    """Return whether values keep their kind of number when they are converted to a dtype.

    Signed integers may be converted to unsigned ones if no value changes. A Python number only has
    to keep its value: 0 has any dtype.
    """
    kind: DType = getattr(value, "dtype", None) or np.asarray(value).dtype
    if np.can_cast(kind, dtype, "same_kind"):
        return True
    is_plain = isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic)
    if {kind.kind, dtype.kind} <= set("iu") or (is_plain and dtype.kind in "biufc"):
        with np.errstate(all="ignore"):
            number = np.asarray(value) if is_plain else value
            return bool((number.astype(dtype) == number).all())
    return False


@contextmanager
def refuse_writes(device: Any, values: Iterable[Any]) -> Iterator[None]:
    """Raise `InputError` at the end if an array among values has changed."""
    arrays = [*arrays_in(values, device.module.ndarray)]
    before = [device.checksum(array) for array in arrays]
    yield
    if before != [device.checksum(array) for array in arrays]:
        raise InputError(
            "expected a function that only reads its fields and constants, got one that writes "
            "into them. Write into a copy, u = u.copy(), or into the parameter out."
        )


def can_refuse(device: Any, function: Callable[..., Any]) -> bool:
    """Return whether the arrays that a function receives refuse writes."""
    return device.has_read_only and not isinstance(function, LibraryFunction)


def arrays_in(values: Iterable[Any], kind: Any) -> Iterator[Any]:
    """Yield the arrays among values, and among the time levels of fields."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, tuple):
            yield from arrays_in(value, kind)
