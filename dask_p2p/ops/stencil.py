"""What the tasks of `map_overlap` call: the user's function, and what cuts the rims off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dask.utils import funcname

from dask_p2p.errors import BlockMismatchError
from dask_p2p.geometry import Index
from dask_p2p.types import Array
from dask_p2p.versioned import versioned

__all__ = ["OwnBlocks", "Stencil", "Trim"]


@versioned()
@dataclass(frozen=True)
class Trim:
    """Cuts the rims off a block.

    Parameters
    ----------
    rims
        For each axis, and each block along it, the widths before and after.
    """

    rims: tuple[tuple[tuple[int, int], ...], ...]

    def __call__(self, block: Array, block_id: Index) -> Array:
        widths = (along[i] for along, i in zip(self.rims, block_id, strict=True))
        # A function may return fewer axes than it should, as Dask lets it.
        sides = zip(widths, block.shape, strict=False)
        return block[(*(slice(before, n - after) for (before, after), n in sides), ...)]


@versioned()
@dataclass(frozen=True)
class Stencil:
    """A function of assembled blocks, and what of its result is a block of the output.

    Parameters
    ----------
    function
        Of an assembled block. It may overwrite that.
    trim
        What cuts the rims off its result; None if the function does.
    has_block_id
        Whether the function is told the block's index.
    """

    function: Callable[..., Any]
    trim: Trim | None = None
    has_block_id: bool = False

    def __call__(self, block: Array, index: Index) -> Any:
        shape = block.shape
        told = {"block_id": index} if self.has_block_id else {}
        result = self.function(block, **told)
        if self.trim is None:
            return result
        if getattr(result, "shape", None) != shape:
            raise BlockMismatchError(
                f"expected an array of shape {shape} from the function for a block of that shape, "
                f"got {getattr(result, 'shape', type(result).__name__)}. Return an array of the "
                f"block's shape, or with trim=False one without the rims."
            )
        return self.trim(result, index)


@versioned()
@dataclass(frozen=True)
class OwnBlocks:
    """A function that Dask calls with blocks of other tasks: it gets copies to overwrite.

    Parameters
    ----------
    function
        Of arrays. Its name and its parameters are what Dask sees.
    """

    function: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.function

    @property
    def __name__(self) -> str:
        return str(funcname(self.function))

    def __call__(self, *blocks: Array, **kwargs: Any) -> Any:
        return self.function(*(block.copy() for block in blocks), **kwargs)
