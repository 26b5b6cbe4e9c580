"""Functions that the tasks of `map_overlap` call: the user's function, and the trimming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from dask.utils import funcname, has_keyword

from dask_p2p.errors import BlockMismatchError
from dask_p2p.geometry import Chunks, Index
from dask_p2p.types import Array, DType
from dask_p2p.versioned import versioned


@versioned()
@dataclass(frozen=True)
class Trim:
    """Trims the halo from a block."""

    halo: tuple[tuple[tuple[int, int], ...], ...]  # widths by axis and block: before and after

    def __call__(self, block: Array, block_id: Index) -> Array:
        widths = (along[i] for along, i in zip(self.halo, block_id, strict=True))
        # Dask allows functions that return fewer axes than expected.
        sides = zip(widths, block.shape, strict=False)
        return block[(*(slice(before, n - after) for (before, after), n in sides), ...)]


@versioned()
@dataclass(frozen=True)
class Stencil:
    """A function of assembled blocks, and the trimming of its result."""

    function: Callable[..., Any]  # user's function, which may overwrite the assembled block
    trim: Trim | None = None  # None: the result is used whole
    has_block_id: bool = False  # whether the function receives the block's index

    def __call__(self, block: Array, index: Index) -> Any:
        shape = block.shape
        context_kwargs = {"block_id": index} if self.has_block_id else {}
        result = self.function(block, **context_kwargs)
        if self.trim is None:
            return result
        if getattr(result, "shape", None) != shape:
            raise BlockMismatchError(
                f"expected an array of shape {shape} from the function for a block of that shape, "
                f"got {getattr(result, 'shape', type(result).__name__)}. Return an array of the "
                f"block's shape, or set trim=False and return one without the halo."
            )
        return self.trim(result, index)


@versioned()
@dataclass(frozen=True)
class OwnBlocks:
    """A function that Dask maps over blocks of other tasks; it receives copies to overwrite."""

    function: Callable[..., Any]  # user's function; Dask reads its name and parameters

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.function

    @property
    def __name__(self) -> str:
        return str(funcname(self.function))

    def __call__(self, /, *blocks: Array, **kwargs: Any) -> Any:
        return self.function(*(block.copy() for block in blocks), **kwargs)


@versioned()
@dataclass(frozen=True)
class SkipsEmpty:
    """A function of blocks with halos that is not called for empty blocks of the output."""

    function: Callable[..., Any]
    chunks: Chunks  # chunks of the output
    dtype: DType  # dtype of the output
    has_block_id: bool  # whether the function receives the block's index

    @property
    def __name__(self) -> str:
        return str(funcname(self.function))

    @property
    def __signature__(self) -> Signature:
        """Signature from which Dask infers that it must pass the index of a block."""
        context_kwargs = [
            "block_id",
            *(["block_info"] if has_keyword(self.function, "block_info") else []),
        ]
        by_name = (Parameter(name, Parameter.KEYWORD_ONLY) for name in context_kwargs)
        return Signature([Parameter("blocks", Parameter.VAR_POSITIONAL), *by_name])

    def __call__(self, /, *blocks: Array, block_id: Index | None = None, **kwargs: Any) -> Any:
        if block_id is None:  # Dask infers the dtype
            return self.function(*blocks, **kwargs)
        if any(along[i] == 0 for along, i in zip(self.chunks, block_id, strict=True)):
            shape = np.broadcast_shapes(*(block.shape for block in blocks))
            return np.empty_like(blocks[0], dtype=self.dtype, shape=shape)
        context_kwargs = {"block_id": block_id} if self.has_block_id else {}
        return self.function(*blocks, **kwargs, **context_kwargs)
