"""Types for signatures; `dask_p2p.geometry` has more.

Array libraries share methods but no class, so `Array` is `Any` for type checkers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

if TYPE_CHECKING:  # `dask` imports this package at each start, so imports stay minimal
    import dask.array
    import numpy as np
    from distributed import Client as Client
    from distributed import LocalCluster as LocalCluster
    from numpy.typing import DTypeLike as DTypeLike
else:
    Client = DTypeLike = LocalCluster = Any


class AsynchronousClient(Protocol):
    """A `distributed.Client` with ``asynchronous=True``; its results are awaited.

    Its class is the same as that of other clients. For type checkers use `typing.cast`.
    """

    @property
    def asynchronous(self) -> Literal[True]:
        """True for an asynchronous client."""


#: A block or a part of one, of NumPy, CuPy or another library with a backend.
Array: TypeAlias = Any
DaskArray: TypeAlias = "dask.array.Array"
#: The dtype class of NumPy and CuPy.
DType: TypeAlias = "np.dtype[Any]"
#: Name of an array's backend: "numpy", "cupy".
Kind: TypeAlias = str
#: Key of a Dask task: a name, or a name and a block index.
Key: TypeAlias = str | tuple[Any, ...]

# Sizes along one axis; None leaves the axis unchanged.
_Sizes: TypeAlias = float | SupportsIndex | str | Sequence[int] | None
#: Chunks as in `dask.array.rechunk`: one size for all axes, a sequence, or a mapping by axis.
ChunksLike: TypeAlias = _Sizes | Sequence[_Sizes] | Mapping[int, _Sizes]

_Width: TypeAlias = SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None  # of one axis
_Depth: TypeAlias = _Width | Sequence[_Width] | Mapping[int, _Width]  # of one array
#: Halo widths for all axes, in a sequence or by axis; or a list of these, one for each array.
DepthLike: TypeAlias = _Depth | list[_Depth]

_Boundary: TypeAlias = str | SupportsFloat | SupportsComplex | Callable[..., None] | None
_Boundaries: TypeAlias = _Boundary | Sequence[_Boundary] | Mapping[int, _Boundary]
#: Boundary conditions at the ends of an array, in the forms of `DepthLike`.
BoundaryLike: TypeAlias = _Boundaries | list[_Boundaries]
