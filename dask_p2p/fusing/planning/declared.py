"""The declared properties of arrays: of those in a graph, and of arguments and results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dask_p2p.errors import ChunksError, InputError
from dask_p2p.geometry import Chunks
from dask_p2p.types import DaskArray, DType


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
