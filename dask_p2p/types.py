"""Types of signatures, beside those of `dask_p2p.layout`.

Libraries of arrays share methods, not a class: a checker takes an `Array` for anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # `dask` itself imports this package at each start, and need not load NumPy
    import numpy as np
    from numpy.typing import DTypeLike
else:
    DTypeLike = Any

__all__ = ["Array", "DType", "DTypeLike", "DaskArray", "Key", "Kind"]

#: A block, or a part of one: of NumPy, CuPy, or another library that has a backend.
Array: TypeAlias = Any
#: `dask.array.Array`, or an expression of arrays: this package runs with either.
DaskArray: TypeAlias = Any
#: What NumPy and CuPy share.
DType: TypeAlias = "np.dtype[Any]"
#: Name of the backend of an array: "numpy", "cupy".
Kind: TypeAlias = str
#: Of a task of Dask: a name, or a name and the index of a block.
Key: TypeAlias = str | tuple[Any, ...]
