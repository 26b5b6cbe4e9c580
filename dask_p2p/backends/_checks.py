"""Checks that all kernels share: they look at shapes and dtypes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_p2p.errors import AxesError, BlockMismatchError
from dask_p2p.types import Array

__all__ = ["transposed"]


def transposed(dst: Array, src: Array, axes: Sequence[int]) -> Any:
    """Return ``src.transpose(axes)``, once it is sure that `dst` fits it.

    NumPy and CuPy would broadcast or convert where shapes or dtypes differ, silently.
    """
    try:
        view = src.transpose(tuple(axes))
    except ValueError as error:
        raise AxesError(
            f"Expected a permutation of the {src.ndim} axes of the source, got {tuple(axes)}. "
            "Give each axis once."
        ) from error
    if dst.shape != view.shape:
        raise BlockMismatchError(
            f"Expected a target of shape {view.shape} for a source of shape {src.shape} and axes "
            f"{tuple(axes)}, got {dst.shape}. Give the shape of source.transpose(axes)."
        )
    if dst.dtype != view.dtype:
        raise BlockMismatchError(
            f"Expected a target of the source's dtype {view.dtype}, got {dst.dtype}. Convert with "
            "astype first; a kernel only moves items."
        )
    return view
