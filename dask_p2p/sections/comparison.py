"""Warnings of users' functions whose results depend on the number of ranks.

The first calls of a function for a block are compared with calls of copies for a part of the block.
A mean of the block, noise with one seed on all ranks, and a read of too far a neighbour then show.

A copy is a pickle of the function and its arguments, made before their first call. So state that a
function keeps shows nothing. Neither do random numbers that differ in each call or on each rank.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf, prod
from types import FunctionType, ModuleType
from typing import Any, TypeAlias, TypeVar

import cloudpickle
import numpy as np
from cloudpickle.cloudpickle import _dynamic_class_reduce, dynamic_subimport
from distributed import warn

from dask_p2p.errors import P2PWarning
from dask_p2p.geometry import Box, box_shape, box_slices
from dask_p2p.loading import is_library
from dask_p2p.types import Array

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: Calls of a function that are compared, until one shows something: a field of zeros shows nothing.
_MOST_CALLS = 8
_MOST_PART = 2**16  # elements of a part of a block, so that its arrays take little memory
_LEAST_PART = 16  # elements of a part along an axis that is shortened
_ROUNDING = 2**10  # largest difference of rounding errors, in units of the last place
_MOST_COPIED_BYTES = 2**26  # larger arrays of a function are lent to its copies, read-only


#: Returns a function's position such that it notes its reads, or moved.
Watch: TypeAlias = Callable[[Any], Any]
#: Computes arrays for a box by copies of values, at a position that a watch returns.
Compute: TypeAlias = Callable[[tuple[Any, ...], Box, Watch], Any]


class FunctionCopies:
    """Returns copies of some values in their present state; None if they have no pickle.

    Functions, classes and modules of the user are copied with their global variables.
    """

    def __init__(self, *values: Any) -> None:
        self._buffers: list[Any] = []
        self._pickled: bytes | None = None
        buffers: list[pickle.PickleBuffer] = []
        with suppress(Exception), io.BytesIO() as file:
            _Pickler(file, buffer_callback=buffers.append).dump(values)
            self._buffers = [_lend(buffer.raw()) for buffer in buffers]
            self._pickled = file.getvalue()

    def __bool__(self) -> bool:
        return self._pickled is not None

    def __call__(self) -> tuple[Any, ...]:
        buffers = (b if isinstance(b, memoryview) else bytearray(b) for b in self._buffers)
        copies: tuple[Any, ...] = _Unpickler(
            io.BytesIO(self._pickled or b""), buffers=buffers
        ).load()
        return copies


def _lend(memory: memoryview) -> Any:
    return bytes(memory) if memory.nbytes <= _MOST_COPIED_BYTES else memory.toreadonly()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions, classes and modules of the user by value.

    `cloudpickle.register_pickle_by_value` would change the pickles of all threads.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            if _is_of_user(obj.__name__):
                state = {k: v for k, v in vars(obj).items() if k != "__builtins__"}
                return dynamic_subimport, (obj.__name__, state)
        elif isinstance(obj, FunctionType) and _is_of_user(obj.__module__):
            return self._dynamic_function_reduce(obj)
        elif isinstance(obj, type) and _is_of_user(obj.__module__):
            return _dynamic_class_reduce(obj)
        return super().reducer_override(obj)


def contents_digest(value: Any, device: Any, least_size: float = inf) -> bytes:
    """Return a digest of all that a value holds; an empty one if it has no pickle.

    Objects of this package are left out. Arrays count by the checksums of their device; from a
    least size on by their identity.
    """
    with suppress(Exception), io.BytesIO() as file:
        _ContentsPickler(file, device, least_size).dump(value)
        return hashlib.blake2b(file.getbuffer()).digest()
    return b""


class _ContentsPickler(_Pickler):
    def __init__(self, file: Any, device: Any, least_size: float) -> None:
        super().__init__(file)
        self._device, self._least_size = device, least_size
        self._arrays = np.ndarray, device.module.ndarray

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, self._arrays) and not value.dtype.hasobject:
            if value.size >= self._least_size:
                return id(value)
            return value.shape, value.dtype.str, value.size and self._device.checksum(value)
        return "dask_p2p" if type(value).__module__.startswith("dask_p2p.") else None


class _Unpickler(pickle.Unpickler):
    """Makes new classes: cloudpickle would change those of this process."""

    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name)
        if module.startswith("cloudpickle") and name.startswith("_make_skeleton_"):
            return lambda *args: value(*args[:-2], None, args[-1])  # without the id of the class
        return value


def _is_of_user(module_name: str | None) -> bool:
    name = (module_name or "").partition(".")[0]
    is_imported = getattr(sys.modules.get(name), "__name__", "") == name != "__main__"
    return is_imported and not is_library(name)


def is_close(module: Any, array: Array, expected: Array) -> bool:
    """Return whether arrays of a module differ by rounding errors only."""
    if expected.dtype.kind not in "fc":
        return bool((expected == array).all())
    tolerance = _ROUNDING * float(np.finfo(expected.dtype).eps)
    largest = float(module.nan_to_num(abs(expected)).max())
    limits = tolerance, tolerance * largest  # relative, absolute
    return bool(module.allclose(array, expected, *limits, equal_nan=True))


class Comparison:
    """Compares calls of a function for a block with calls of copies for a part of the block."""

    def __init__(
        self,
        name: str,  # of the function in warnings
        block: str,  # its name in warnings
        remedy: str,  # sentences with another way, for warnings
        box: Box,  # bounds of the block
        is_divided: Sequence[bool],  # by axis: whether its elements are divided between ranks
        values: Sequence[Any],  # the function and its arguments that a call may change
        module: Any = np,  # of the arrays
    ) -> None:
        self._name, self._block, self._remedy, self._module = name, block, remedy, module
        lengths = zip(box_shape(box), is_divided, strict=True)
        #: By axis: length of the block if it is divided, else 0.
        self._lengths = [n if is_cut and n > 1 else 0 for n, is_cut in lengths]
        self._box, self._part = box, _part_of(box, self._lengths)
        self._copies = FunctionCopies(*values if any(self._lengths) else ())
        self._calls_left = _MOST_CALLS if any(self._lengths) and self._copies else 0

    def __bool__(self) -> bool:  # whether the next call is compared
        return self._calls_left > 0

    def __call__(
        self,
        compute: Compute,
        call: Callable[[], T],  # calls the function for the whole block
        arrays: Callable[[T], Any],  # returns the arrays for the whole block, from that value
        read: Sequence[Array] | None = None,  # that the function reads; by default its values
    ) -> T:
        """Return the value of a call for the whole block; warn if it depends on the block.

        If the arrays that it reads are uniform, the next call is compared, too.
        """
        part = None
        with suppress(Exception):  # of a function for blocks of this size alone
            part = self._of_parts(compute)  # before the call: files that both write have its values
        value = call()
        call_count, self._calls_left = self._calls_left - 1, 0
        if part is not None:
            with suppress(Exception):
                if self._depends(compute, part, self._cut(arrays(value))):
                    self._warn()
                elif not any(
                    a.size and bool(a.min() != a.max())  # else a mean is the same as each element
                    for a in (arrays(value) if read is None else read)
                ):
                    self._calls_left = call_count
        return value

    def _warn(self) -> None:
        warn(
            f"{self._name} returns other values for halves of {self._block} than for the whole, so "
            f"its result depends on the number of ranks. {self._remedy}",
            P2PWarning,
        )

    def _depends(self, compute: Compute, part: Sequence[Array], cut: Sequence[Array]) -> bool:
        """Return whether values depend on the division of the array into blocks."""
        if self._is_same(part, cut):
            return False
        reads: list[str] = []  # "rank", and "at" for any other position
        again = self._of_parts(compute, reads)
        cut = self._of_whole(compute)
        if "rank" in reads or not self._is_same(again, part) or self._is_same(part, cut):
            return False  # random numbers of each rank, or of each call; a state
        if "at" not in reads:
            return True
        # Random numbers by the position differ elsewhere; those of a mean differ alike.
        away = self._of_parts(compute, reads, self._lengths), self._of_whole(compute, self._lengths)
        changes = (_subtract(*pair) for pair in zip(*away, strict=True))
        arrays = zip(cut, part, changes, strict=True)
        return self._is_same(cut, [c + change - _subtract(p, c) for c, p, change in arrays])

    def _of_parts(
        self, compute: Compute, reads: list[str] | None = None, shift: Sequence[int] = ()
    ) -> list[Array]:
        return [*compute(self._copies(), self._part, lambda at: at.watched(reads, shift))]

    def _of_whole(self, compute: Compute, shift: Sequence[int] = ()) -> list[Array]:
        return self._cut(compute(self._copies(), self._box, lambda at: at.watched(None, shift)))

    def _cut(self, arrays: Sequence[Array]) -> list[Array]:
        slices = box_slices(self._part, within=self._box)
        return [array[slices] for array in arrays]

    def _is_same(self, parts: Sequence[Array], cut: Sequence[Array]) -> bool:
        return all(is_close(self._module, *pair) for pair in zip(parts, cut, strict=True))


def _part_of(box: Box, lengths: Sequence[int]) -> Box:
    """Return a part with two cuts along each axis that has a length; of large blocks a small part.

    It lies off the centre, where waves have other means.
    """
    shape = [
        max(1, n * 10 // 21) if n else size for size, n in zip(box_shape(box), lengths, strict=True)
    ]
    while any(lengths) and prod(shape) > _MOST_PART:
        axis = max((axis for axis, n in enumerate(lengths) if n), key=shape.__getitem__)
        if shape[axis] <= _LEAST_PART:
            break
        shape[axis] //= 2
    starts = (low + (max(1, n // 7) if n else 0) for (low, _), n in zip(box, lengths, strict=True))
    return tuple((start, start + length) for start, length in zip(starts, shape, strict=True))


def _subtract(a: Array, b: Array) -> Array:
    return a.astype(np.result_type(a.dtype, np.float64)) - b


def watch_positions(values: Mapping[str, Any], watch: Watch) -> dict[str, Any]:
    """Return the arguments of a copy, whose reads of its position a watch notes."""
    return {name: watch(x) if hasattr(x, "watched") else x for name, x in values.items()}
