"""Frequencies of transforms and their order: fftfreq, rfftfreq, fftshift, ifftshift."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
from dask.array.utils import asarray_safe, meta_from_array

from dask_p2p.config import checked_options
from dask_p2p.errors import InputError
from dask_p2p.graph.arrays import planned_array
from dask_p2p.graph.libraries import functions_of, is_dask_array
from dask_p2p.inputs import checked_count
from dask_p2p.ops.arguments import check_array, check_chunks_are_known, checked_chunks
from dask_p2p.ops.fft.stages import Axes, checked_numbered_axes
from dask_p2p.plans import GridPlan
from dask_p2p.plans.grid import SplitAxis
from dask_p2p.plans.rolled import Rolled
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.types import ChunksLike, DaskArray


def fftshift(x: DaskArray, axes: int | Axes = None, *, chunks: ChunksLike = None) -> DaskArray:
    """Move the zero frequency to the middle, as `numpy.fft.fftshift` does.

    Parameters
    ----------
    x : dask.array.Array
        Array of NumPy or CuPy blocks, of any dtype.
    axes : int or sequence of int, optional
        Axes to shift. Default: all.
    chunks : int, str, tuple or dict, optional
        Chunks of the result. The shift and the rechunk are one exchange. Default: chunks of `x`.

    Returns
    -------
    dask.array.Array
        Lazy array with the dtype and block type of `x`.

    Raises
    ------
    UnsupportedArrayError, AxesError, ChunksError
        See `dask_p2p.fft`.

    Examples
    --------
    >>> fftshift(fftfreq(4, chunks=2)).compute()
    array([-0.5 , -0.25,  0.  ,  0.25])
    """
    return _rolled(x, axes, 1, chunks)


def ifftshift(x: DaskArray, axes: int | Axes = None, *, chunks: ChunksLike = None) -> DaskArray:
    """Undo `fftshift`, with the same parameters."""
    return _rolled(x, axes, -1, chunks)


def fftfreq(n: int, d: float = 1.0, *, chunks: ChunksLike = "auto", like: Any = None) -> DaskArray:
    """Return the frequencies of `fft`, as `numpy.fft.fftfreq` does.

    Parameters
    ----------
    n : int
        Length of the transform.
    d : float, optional
        Sample spacing. Default: 1.
    chunks : int, str or tuple, optional
        Chunks of the result. Default: "auto".
    like : array, optional
        NumPy, CuPy or Dask array that sets the type of the blocks, and the library of the result.
        Default: NumPy blocks, and `dask.array`.

    Returns
    -------
    dask.array.Array
        Lazy array of `n` numbers.

    Raises
    ------
    InputError
        If `n` is not a positive integer, or `d` is zero or not a number.
    ChunksError
        If `chunks` does not fit the result.
    """
    n = _checked_samples(n, d)
    numbers = _numbers(n, chunks, like)
    return numbers.map_blocks(_frequencies, n, 1.0 / (n * d), meta=numbers._meta.astype(float))


def rfftfreq(n: int, d: float = 1.0, *, chunks: ChunksLike = "auto", like: Any = None) -> DaskArray:
    """Return the frequencies of `rfft`. For parameters and errors see `fftfreq`."""
    n = _checked_samples(n, d)
    return _numbers(n // 2 + 1, chunks, like) * (1.0 / (n * d))


def _numbers(count: int, chunks: ChunksLike, like: Any) -> DaskArray:
    # Several sizes are block sizes for `da.arange`; for `rechunk` they would be one for each axis.
    if isinstance(chunks, (tuple, list)) and len(chunks) > 1:
        chunks = (tuple(chunks),)
    (sizes,) = checked_chunks(chunks, ((count,),), np.dtype(float))
    numbers: DaskArray = functions_of(like).arange(count, chunks=(sizes,))
    block = like._meta if is_dask_array(like) else like
    if block is None or type(block) is np.ndarray:
        return numbers
    # `arange(like=...)` of Dask gives blocks of all libraries the same keys.
    meta = meta_from_array(block, 1, dtype=numbers.dtype)
    made: DaskArray = numbers.map_blocks(asarray_safe, like=meta, dtype=numbers.dtype, meta=meta)
    return made


def _checked_samples(n: int, d: Any) -> int:
    if not isinstance(d, (Real, np.number)) or d == 0 or d != d:
        raise InputError(f"expected a sample spacing, a number other than 0, got d={d!r}.")
    return checked_count("elements", n=n)


def _frequencies(numbers: Any, n: int, step: float) -> Any:
    return ((numbers + n // 2) % n - n // 2) * step


def _rolled(x: DaskArray, axes: int | Axes, sign: int, chunks: ChunksLike) -> DaskArray:
    check_array(x)
    check_chunks_are_known(x)
    along = range(x.ndim) if axes is None else checked_numbered_axes(np.atleast_1d(axes), x.ndim)
    before = tuple(tuple(map(int, sizes)) for sizes in x.chunks)
    after = before if chunks is None else checked_chunks(chunks, before, x.dtype)
    mappings: list[Any] = []
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        shift = sign * (sum(old) // 2) if axis in along else 0
        mappings.append(Rolled(old, new, shift) if shift else SplitAxis(old, new))
    if after == before and not any(isinstance(mapping, Rolled) for mapping in mappings):
        return x
    register_if_possible()
    plan = GridPlan(tuple(range(x.ndim)), tuple(mappings))
    return planned_array("p2p-fftshift", x, plan, checked_options())
