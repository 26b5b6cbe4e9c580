"""Fourier transforms of Dask arrays, along axes that may be split into several blocks.

The functions have the names, parameters and values of `numpy.fft`. An axis with one block is whole,
and is transformed in place. For any other axis, an exchange between the workers makes it whole, and
the tasks that assemble the blocks transform them. So a transform of slabs along all axes is two
layers, and one of them moves data. `dask_p2p.plans.fft` plans the order of the axes.

NumPy blocks are transformed by `scipy.fft` if SciPy is installed, else by `numpy.fft`; CuPy blocks
by cuFFT. The dtypes float16, float32 and complex64 give single precision (complex64 or float32).
Long doubles keep their precision, and all others give double precision.

All functions take `chunks`, the chunks of the result, in any form that `dask.array.rechunk` takes.
The default chunks need the fewest exchanges; for ``ifftn(y)`` with y computed from ``fftn(x)``,
they are the chunks of x. An exchange can produce any chunks, as long as the axis that is
transformed last stays whole. So ``ifftn(y, chunks=x.chunks)`` takes no more exchanges than
``ifftn(y)`` if one of the transformed axes is whole in x.

Errors of all functions:

- `UnsupportedArrayError`: the input is not a Dask array of numbers.
- `InputError`: the array lacks an axis, or an axis is given twice.
- `InputError`: the chunk sizes are unknown, or `chunks` does not fit the result.
- `InputError`: a length is below 1, the norm is unknown, or a real transform gets complex input.
"""

from __future__ import annotations

from dask_p2p.inputs import checked_count
from dask_p2p.ops.estimate import MemoryEstimate, estimate_exchanges
from dask_p2p.ops.fft.stages import (
    Axes,
    Length,
    Lengths,
    Norm,
    fftfreq,
    fftshift,
    ifftshift,
    rfftfreq,
    transform_array,
)
from dask_p2p.types import ChunksLike, DaskArray

__all__ = [
    "estimate",
    "fft",
    "fft2",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftfreq",
    "rfftn",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def fft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Transform along one axis, as `numpy.fft.fft` does.

    Parameters
    ----------
    x : dask.array.Array
        Array of NumPy or CuPy blocks.
    n : int, optional
        Length of the transform: the axis is cropped, or padded with zeros. Default: its length.
    axis : int, optional
        Axis of the transform. Default: the last.
    norm : {"backward", "ortho", "forward"}, optional
        Direction that is scaled. Default: "backward", the inverse.
    chunks : int, str, tuple or dict, optional
        Chunks of the result. Default: the chunks that need the fewest exchanges.

    Returns
    -------
    dask.array.Array
        Lazy array of complex numbers, with the precision and block type of `x`.

    Raises
    ------
    UnsupportedArrayError, InputError
        See `dask_p2p.fft`.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((4, 6), chunks=(4, 3))
    >>> fft(x).chunks
    ((2, 2), (6,))
    """
    return _along_one("fft", x, n, axis, norm, chunks)


def ifft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Undo `fft`, as `numpy.fft.ifft` does. See `fft` for parameters and errors."""
    return _along_one("ifft", x, n, axis, norm, chunks)


def rfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Transform real numbers along one axis to ``n // 2 + 1`` complex ones. See `fft`."""
    return _along_one("rfft", x, n, axis, norm, chunks)


def irfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Undo `rfft`: return `n` real numbers along the axis, by default an even number. See `fft`."""
    return _along_one("irfft", x, n, axis, norm, chunks)


def hfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Transform Hermitian numbers to `n` real ones, as `numpy.fft.hfft` does. See `irfft`."""
    return _along_one("hfft", x, n, axis, norm, chunks)


def ihfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Undo `hfft`, as `numpy.fft.ihfft` does. See `rfft`."""
    return _along_one("ihfft", x, n, axis, norm, chunks)


def fftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Transform along several axes, as `numpy.fft.fftn` does.

    Parameters
    ----------
    x : dask.array.Array
        Array of NumPy or CuPy blocks.
    s : sequence of int, optional
        Lengths of the transform, one for each of `axes`: an axis is cropped, or padded with zeros.
        None and -1 keep the axis's length. Default: all lengths are kept.
    axes : sequence of int, optional
        Axes of the transform, each once. Default: all axes, or the last ``len(s)``. With an empty
        sequence the result is `x`.
    norm, chunks
        See `fft`.

    Returns
    -------
    dask.array.Array
        Lazy array of complex numbers, with the precision and block type of `x`.

    Raises
    ------
    UnsupportedArrayError, InputError
        See `dask_p2p.fft`.

    Examples
    --------
    The transform of slabs has slabs along another axis; its inverse has the original chunks:

    >>> import dask.array as da
    >>> y = fftn(da.ones((4, 6, 8), chunks=(2, 6, 8)))
    >>> y.chunks, ifftn(y).chunks
    (((4,), (3, 3), (8,)), ((2, 2), (6,), (8,)))
    """
    return transform_array("fft", x, s, axes, norm, chunks)


def ifftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `fftn`, as `numpy.fft.ifftn` does. See `fftn` for parameters and errors."""
    return transform_array("ifft", x, s, axes, norm, chunks)


def rfftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Transform real numbers: as `rfft` along the last of `axes`, as `fftn` along the others."""
    return transform_array("rfft", x, s, axes, norm, chunks)


def irfftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `rfftn`: return real numbers, by default an even number along the last of `axes`.

    In `s`, None is the default length, and -1 the number of elements of `x` along the axis.
    """
    return transform_array("irfft", x, s, axes, norm, chunks)


def fft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Transform along two axes, by default the last two. See `fftn`."""
    return fftn(x, s, axes, norm, chunks=chunks)


def ifft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `fft2`: `ifftn` along two axes, by default the last two."""
    return ifftn(x, s, axes, norm, chunks=chunks)


def rfft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Transform real numbers along two axes, by default the last two. See `rfftn`."""
    return rfftn(x, s, axes, norm, chunks=chunks)


def irfft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `rfft2`: `irfftn` along two axes, by default the last two."""
    return irfftn(x, s, axes, norm, chunks=chunks)


def _along_one(
    kind: str, x: DaskArray, n: Length, axis: int, norm: Norm, chunks: ChunksLike
) -> DaskArray:
    length = None if n is None else checked_count("elements", n=n)
    return transform_array(kind, x, (length,), (axis,), norm, chunks)


def estimate(y: DaskArray, *, workers: int | None = None) -> MemoryEstimate:
    """Estimate the exchanges of a lazy array: their number, the bytes they move, their memory.

    Computes nothing. The estimate assumes that blocks are spread evenly over the workers, with
    neighbours on the same worker. It leaves out the memory of Dask's own tasks.

    Parameters
    ----------
    y : dask.array.Array
        A result of a function of this module, or an array computed from one.
    workers : int, optional
        Number of workers, each with one thread. Default: the workers and threads of the current
        synchronous client. Without a client: the largest number of blocks that an exchange reads.

    Returns
    -------
    MemoryEstimate
        The number of exchanges, the bytes that all of them move, and the memory of the largest.

    Raises
    ------
    UnsupportedArrayError
        If `y` is not a Dask array.
    InputError
        If `workers` is not a positive integer.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((256, 256, 256), chunks=(64, -1, -1)).astype(complex)
    >>> need = estimate(fftn(x), workers=4)
    >>> need.exchanges, need.moved_bytes == x.nbytes * 3 / 4
    (1, True)
    """
    return estimate_exchanges(y, workers)
