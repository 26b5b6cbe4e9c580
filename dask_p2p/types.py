"""Types of signatures; `dask_p2p.geometry` has others.

Libraries of arrays share methods, not a class: a checker takes an `Array` for anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    SupportsComplex,
    SupportsFloat,
    SupportsIndex,
    TypeAlias,
)

if TYPE_CHECKING:  # `dask` itself imports this package at each start, and need load nothing else
    import dask.array
    import numpy as np
    from distributed import Client as Client
    from distributed import LocalCluster as LocalCluster
    from numpy.typing import DTypeLike as DTypeLike
else:
    Client = DTypeLike = LocalCluster = Any


class AsynchronousClient(Protocol):
    """A `distributed.Client` that was made with ``asynchronous=True``: its answers are awaited.

    Type checkers cannot tell it from others by its class. `typing.cast` tells them.
    """

    @property
    def asynchronous(self) -> Literal[True]:
        """Whether that is so."""


#: A block, or a part of one: of NumPy, CuPy, or another library that has a backend.
Array: TypeAlias = Any
DaskArray: TypeAlias = "dask.array.Array"
#: What NumPy and CuPy share.
DType: TypeAlias = "np.dtype[Any]"
#: Name of the backend of an array: "numpy", "cupy".
Kind: TypeAlias = str
#: Of a task of Dask: a name, or a name and the index of a block.
Key: TypeAlias = str | tuple[Any, ...]

# Of one axis; None leaves it as it is.
_Sizes: TypeAlias = float | SupportsIndex | str | Sequence[int] | None
#: What `dask.array.rechunk` takes as chunks: one size for all axes, or sizes for each or by axis.
ChunksLike: TypeAlias = _Sizes | Sequence[_Sizes] | Mapping[int, _Sizes]

_Width: TypeAlias = SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None  # of one axis
_Depth: TypeAlias = _Width | Sequence[_Width] | Mapping[int, _Width]  # of one array
#: Widths of rims: for all axes, for each or by axis; or a list of these, one for each array.
DepthLike: TypeAlias = _Depth | list[_Depth]

_Boundary: TypeAlias = str | SupportsFloat | SupportsComplex | None
_Boundaries: TypeAlias = _Boundary | Sequence[_Boundary] | Mapping[int, _Boundary]
#: What lies beyond the ends of an array, given as a `DepthLike` is.
BoundaryLike: TypeAlias = _Boundaries | list[_Boundaries]
