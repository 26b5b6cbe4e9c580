"""The declared properties of arrays: of those in a graph, and of arguments and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isnan, prod
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.errors import ChunksError, InputError
from dask_p2p.geometry import Chunks
from dask_p2p.types import DaskArray, DType

#: Largest size of a value that comes with a call: each rank gets a copy.
MOST_VALUE_BYTES = 2**12
#: Parts of the error for other arguments.
EXPECTED_VALUE = "expected a number or a NumPy array of at most 4 KiB, as in compile"
OF_ARRAY = (
    "For results of calls compile the function with a Dask array: da.from_array(np.array(0.0))."
)


class DeclaredBlocks(NamedTuple):
    """The declared properties of the blocks of an array in a graph."""

    chunks: Chunks
    dtype: DType


def blocks_of_layers(layers: Mapping[str, Any]) -> dict[str, DeclaredBlocks]:
    """Return the blocks of the arrays that layers belong to, by name.

    Dask keeps the properties of an array with its layer. Other layers are left out.
    """
    found = {}
    for name, layer in layers.items():
        known = getattr(layer, "collection_annotations", None) or {}
        if known.get("chunks") is not None and "dtype" in known:
            found[name] = DeclaredBlocks(known["chunks"], known["dtype"])
    return found


def blocks_of_expression(expr: Any) -> dict[str, DeclaredBlocks]:
    """Return the blocks of the arrays that an expression consists of, by name."""
    found, stack, seen = dict[str, DeclaredBlocks](), [expr], set[str]()
    while stack:
        each = stack.pop()
        if each._name in seen:
            continue
        seen.add(each._name)
        # Merged operations of `dask_array` have their parts as `exprs`.
        stack += [*each.dependencies(), *getattr(each, "exprs", ())]
        with suppress(AttributeError, NotImplementedError):  # no array
            found[each._name] = DeclaredBlocks(each.chunks, each.dtype)
    return found


@dataclass(frozen=True)
class Declared:
    """The properties of an argument, or of a result."""

    name: str
    chunks: Chunks
    dtype: DType
    meta: Any

    @classmethod
    def of(cls, x: DaskArray) -> Declared:
        return cls(x.name, x.chunks, x.dtype, x._meta)

    @property
    def takes_values(self) -> bool:
        """True if an argument may be a number or a small NumPy array: it has one small block."""
        count = prod(map(sum, self.chunks))
        is_one = all(len(sizes) == 1 for sizes in self.chunks) and not isnan(count)
        is_small = is_one and count * self.dtype.itemsize <= MOST_VALUE_BYTES
        return is_small and isinstance(self.meta, np.ndarray)

    def value_of(self, number: int, x: Any) -> Any:
        """Return a number or a NumPy array as the block of an argument, by its number."""
        return DeclaredValue(tuple(map(sum, self.chunks)), self.dtype).value_of(number, x)

    def check(self, number: int, x: Any) -> None:
        """Refuse an argument, by its number, of other chunks or of another dtype."""
        if x.chunks != self.chunks:
            raise ChunksError(
                f"argument {number}: expected the chunks of the example, {self.chunks}, got "
                f"{x.chunks}. Call x.rechunk, or compile the function for these chunks."
            )
        if x.dtype != self.dtype:
            raise InputError(
                f"argument {number}: expected the dtype of the example, {self.dtype}, got "
                f"{x.dtype}. Call x.astype, or compile the function for this dtype."
            )


@dataclass(frozen=True)
class DeclaredValue:
    """The properties of an argument that is a number, or a small NumPy array."""

    shape: tuple[int, ...]
    dtype: DType

    @classmethod
    def of(cls, x: Any, dtypes: Iterable[DType]) -> DeclaredValue:
        """Return the properties of an example.

        A number of Python has the precision of the arrays, whose dtypes are given: as in NumPy, a
        product with it keeps their dtype.
        """
        dtype = np.asarray(x).dtype
        inexact = [each for each in dtypes if each.kind in "fc"]
        if type(x) in (float, complex) and inexact:
            dtype = np.result_type(*inexact, x)
            if type(x) is float and dtype.kind == "c":
                dtype = np.empty(0, dtype).real.dtype
        return cls(np.shape(x), dtype)

    def value_of(self, number: int, x: Any) -> Any:
        """Return an argument, by its number, as a NumPy array.

        Raises `ChunksError` for another shape, and `InputError` for a value that the dtype cannot
        hold.
        """
        value = np.asarray(x)
        if value.shape != self.shape:
            raise ChunksError(
                f"argument {number}: expected a value of the shape of the example, {self.shape}, "
                f"got {value.shape}. Compile the function for this shape."
            )
        if np.can_cast(value.dtype, self.dtype, "same_kind"):
            with np.errstate(over="ignore", invalid="ignore"):
                made = value.astype(self.dtype, order="C")
            if self.dtype.kind not in "iu" or (made == value).all():
                return made
        raise InputError(
            f"argument {number}: expected a value for the dtype of the example, {self.dtype}, got "
            f"{x!r:.80}. Compile the function with an example of this type, such as 0.0."
        )


def is_value(x: Any) -> bool:
    """Return whether an argument is a number, or a small NumPy array."""
    if isinstance(x, (np.ndarray, np.generic)):
        return bool(x.nbytes <= MOST_VALUE_BYTES and x.dtype.kind in "?biufcmM")
    return isinstance(x, (bool, int, float, complex))
