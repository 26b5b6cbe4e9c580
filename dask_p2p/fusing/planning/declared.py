"""The declared properties of the arguments and results of a compiled function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dask_p2p.errors import ChunksError, InputError
from dask_p2p.geometry import Chunks
from dask_p2p.types import DaskArray, DType


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
