"""Boundaries by functions: values beyond the ends of the array, made from their mirror image.

An exchange fills halos beyond the ends with the mirror image of the array, and then a function
changes them, one axis after the other. So corners have the values that `numpy.pad` would give them,
and no message is added::

      rim    inside           rim, after rim[...] = -inside
    +-----+---------+        +-----+---------+
    | b a | a b c d |        |-b -a| a b c d |
    +-----+---------+        +-----+---------+
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import numpy as np
from dask.utils import funcname

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, box_shape, box_size, box_slices, move_box, whole_box
from dask_p2p.plans.halo import ODD, RankHalo, both_ends
from dask_p2p.sections.comparison import Comparison, Watch
from dask_p2p.sections.exchange.device import Host
from dask_p2p.types import Array, DType


def planned(boundary: Sequence[Any]) -> tuple[Any, ...]:
    """Return the boundary of each axis as plans have it: functions need the mirror image."""

    def end(value: Any) -> Any:
        return "reflect" if _function(value) is not None else value

    return tuple(
        tuple(map(end, ends)) if isinstance(ends, tuple) else end(ends) for ends in boundary
    )


def described(boundary: Sequence[Any]) -> str:
    """Return a text of the boundary that is the same on all ranks."""
    names = [
        getattr(end, "__qualname__", type(end).__name__) if callable(end) else repr(end)
        for ends in boundary
        for end in both_ends(ends)
    ]
    return f"({', '.join(names)})"


def functions_of(boundary: Sequence[Any]) -> list[Callable[..., Any]]:
    """Return the user's functions in the boundary of each axis."""
    return [end for ends in boundary for end in both_ends(ends) if callable(end)]


def _function(boundary: Any) -> Callable[..., Any] | None:
    if isinstance(boundary, str):
        return _odd if boundary == ODD else None
    return boundary if callable(boundary) else None


def _odd(rim: Array, inside: Array, at: Any) -> None:
    rim[...] = -inside


class At:
    """The position of a block, or of a part beyond the ends: parameter `at` of functions.

    Attributes
    ----------
    shape : tuple of int
        Shape of the whole array.
    """

    def __init__(
        self,
        rank: int,
        shape: tuple[int, ...],
        box: Box,
        module: Any,  # of the indices: NumPy or CuPy
        step: Callable[[str], int],  # returns the number of the step, for a name in errors
    ) -> None:
        self._rank, self.shape, self._box = rank, shape, box
        self._module, self._step = module, step
        self._reads: list[str] | None = None  # names of attributes that a function has read

    @property
    def rank(self) -> int:
        self._note("rank")
        return self._rank

    @property
    def box(self) -> Box:
        """Position of the block in the whole array: (start, stop) of each axis."""
        self._note("at")
        return self._box

    @property
    def step(self) -> int:
        """Number of the step, from 0.

        Raises `InputError` with ``capture=True``, since all replayed steps have the same number.
        """
        return self._step("at.step")

    @cached_property
    def index(self) -> tuple[Array, ...]:
        """Indices of the block's elements in the whole array, as by `numpy.ogrid`: read-only."""
        along = (
            self._placed(axis, self._module.arange(start, stop))
            for axis, (start, stop) in enumerate(self.box)
        )
        index: tuple[Array, ...] = self._module.ix_(*along)
        for indices in index if self._module is np else ():  # CuPy's cannot be
            indices.flags.writeable = False
        return index

    def with_indices(self, convert: Callable[[Array], Any]) -> At:
        converted = copy(self)
        vars(converted)["index"] = tuple(map(convert, self.index))
        return converted

    def watched(self, reads: list[str] | None, shift: Sequence[int]) -> At:
        """Return the position, moved along each axis; it adds its reads to `reads`."""
        position = copy(self)
        vars(position).pop("index", None)
        position._reads = reads
        if shift:
            position._box = move_box(self._box, shift)
        return position

    def _note(self, name: str) -> None:
        if self._reads is not None:
            self._reads.append(name)

    def _placed(self, axis: int, positions: Array) -> Array:
        return positions


class _RimAt(At):
    """The position of a part beyond an end of one axis.

    Further axes have no values of their own beyond their ends yet: these have the indices that the
    values come from.
    """

    def __init__(self, at: At, box: Box, axis: int, boundary: Sequence[Any]) -> None:
        super().__init__(at._rank, at.shape, box, at._module, at._step)
        self._axis, self._boundary = axis, boundary

    def _placed(self, axis: int, positions: Array) -> Array:
        if axis <= self._axis:
            return positions
        module, length = self._module, self.shape[axis]
        before, after = both_ends(self._boundary[axis])
        low = module.where(positions < 0, _source(before, positions, length), positions)
        return module.where(low >= length, _source(after, low, length), low)


def _source(end: Any, positions: Array, length: int) -> Array:
    if isinstance(end, str) and end == "periodic":
        return positions % length
    if _function(end) is None and end != "reflect":
        return positions.clip(0, length - 1)
    mirrored: Array = abs(positions + 0.5) - 0.5
    return (length - 0.5 - abs(length - 0.5 - mirrored)).astype(positions.dtype)


class Ends:
    """The parts of a local block's halo that functions fill, after each exchange."""

    def __init__(
        self,
        halo: RankHalo,
        boundary: Sequence[Any],
        at: At,  # position of the local block
        device: Host,
        dtype: DType,
    ) -> None:
        self._fills: list[Callable[[Array], None]] = []
        lows = [low - start for (low, _), (start, _) in zip(at.box, halo.inner, strict=True)]
        for axis, end, part in _parts(lows, halo.shape, boundary, at.shape):
            where = box_slices(move_box(part, [-low for low in lows]))
            function = _function(end)
            if function is not None and (function is _odd or not device.has_read_only):
                inside = device.empty(box_shape(part), dtype)
                position = _RimAt(at, part, axis, boundary)
                self._fills.append(partial(_call, function, inside, position, where))
            elif function is not None:
                self._fills.append(_HostEnd(function, where, at, part, axis, boundary))
            elif self._fills:  # a function has overwritten a corner
                self._fills.append(partial(_set_boundary, end, where))

    def __bool__(self) -> bool:
        return bool(self._fills)

    def fill(self, data: Array) -> None:
        """Fill all parts, in the order of the axes.

        Raises `InputError` for a function that returns values.
        """
        for fill in self._fills:
            fill(data)


def _call(
    function: Callable[..., Any],
    inside: Array,  # memory for all calls
    at: At,
    where: Any,
    data: Array,
) -> None:
    rim = data[where]
    inside[...] = rim
    _check_filled(function(rim, inside, at))


def _check_filled(filled: Any) -> None:
    if filled is not None:
        raise InputError(
            "boundary: expected a function that fills its first argument, rim[...] = ..., and "
            "returns None, got one that returns a value. Fill rim."
        )


class _HostEnd:
    """A user's function that fills a part beyond an end, in host memory.

    It receives new arrays in each call, which it may keep.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        where: Any,  # in the memory of the local block
        at: At,  # position of the local block
        part: Box,
        axis: int,
        boundary: Sequence[Any],
    ) -> None:
        self._function, self._where = function, where
        self._position = at, part, axis, boundary
        self._at = _RimAt(*self._position)
        pairs = zip(at.box, at.shape, strict=True)
        self._comparison = Comparison(
            f"boundary: {funcname(function)}",
            "the part beyond an end",
            "It must compute each element by itself. Compute means and sums of the whole array "
            "before, as another field or by spmd and ctx.allreduce.",
            whole_box(box_shape(part)),
            [bounds != (0, n) and at != axis for at, (bounds, n) in enumerate(pairs)],
            [function],
        )

    def __call__(self, data: Array) -> None:
        rim = data[self._where]
        call = partial(_filled, self._function, rim, self._at)
        if self._comparison:
            rim[...] = self._comparison(
                partial(self._of_box, rim), call, lambda values: [values], [rim]
            )
        else:
            rim[...] = call()

    def _of_box(
        self, mirrored: Array, copies: tuple[Any, ...], box: Box, watch: Watch
    ) -> list[Array]:
        at, part, axis, boundary = self._position
        placed = move_box(box, [low for low, _ in part])
        position = watch(_RimAt(at, placed, axis, boundary))
        (function,) = copies
        return [_filled(function, mirrored[box_slices(box)], position)]


def _filled(function: Callable[..., Any], mirrored: Array, at: At) -> Array:
    rim, inside = mirrored.copy(), mirrored.copy()
    _check_filled(function(rim, inside, at))
    return rim


def _set_boundary(value: Any, where: Any, data: Array) -> None:
    data[where] = value


def _parts(
    lows: Sequence[int],  # by axis: the first index of the local block with its halo
    sizes: Sequence[int],
    boundary: Sequence[Any],
    shape: Sequence[int],  # of the whole array
) -> Iterator[tuple[int, Any, Box]]:
    """Yield axis, boundary and position of each part beyond an end with a function or a number."""
    box = tuple((low, low + size) for low, size in zip(lows, sizes, strict=True))
    for axis, axis_ends in enumerate(boundary):
        (low, high), (before, after) = box[axis], both_ends(axis_ends)
        for end, start, stop in ((before, low, min(high, 0)), (after, max(low, shape[axis]), high)):
            part = (*box[:axis], (start, stop), *box[axis + 1 :])
            if start < stop and box_size(part) and (end == ODD or not isinstance(end, str)):
                yield axis, end, part
