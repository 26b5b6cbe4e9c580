"""Fourier transforms of Dask arrays, along axes that may be cut into several blocks.

The functions have the names, parameters and values of `numpy.fft`. An axis that is whole, one block
along it, is transformed where it lies. Another one is made whole by an exchange between the
workers, and transformed in the tasks that assemble its blocks: so a transform of slabs along all
axes is two layers, of which one moves data. `dask_p2p.plans.fft` says which axis comes when.

NumPy blocks are transformed by `scipy.fft` where SciPy is installed, else by `numpy.fft`; CuPy
blocks by cuFFT. Single precision stays single: float16, float32 and complex64 give complex64 or
float32, all others double precision; long doubles stay what they are.

All functions take `chunks`, the chunks of the result, as `dask.array.rechunk` takes them; by
default they are those that come of the fewest exchanges, and for ``ifftn(y)`` those that x had, if
y was made of ``fftn(x)``. The result of an exchange can have any chunks that leave the axis whole
which was transformed last: ``ifftn(y, chunks=x.chunks)`` takes no more exchanges than ``ifftn(y)``
where one of these axes is whole in x.

All raise `UnsupportedArrayError` for what is no Dask array of numbers, `AxesError` for axes that
the array does not have or that are named twice, `ChunksError` for unknown chunk sizes or chunks
that do not fit, and `InputError` for lengths below 1, unknown norms, and complex input of a real
transform.
"""

from __future__ import annotations

from dask_p2p.inputs import checked_count
from dask_p2p.ops.fft_estimate import estimate
from dask_p2p.ops.fft_stages import Axes, Length, Lengths, Norm, transformed
from dask_p2p.ops.frequencies import fftfreq, fftshift, ifftshift, rfftfreq
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


def fft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Transform along one axis, as `numpy.fft.fft` does.

    Parameters
    ----------
    x : dask.array.Array
        Array of NumPy or CuPy blocks.
    n : int, optional
        Length of the transform: the axis is cropped, or padded with zeros. By default its length.
    axis : int, optional
        The axis, by default the last.
    norm : {"backward", "ortho", "forward"}, optional
        Which direction is scaled, by default the inverse one.
    chunks : int, str, tuple or dict, optional
        Chunks of the result. By default those that come of the fewest exchanges.

    Returns
    -------
    dask.array.Array
        Lazy, of complex numbers of the precision of `x`, in blocks of its type.

    Raises
    ------
    UnsupportedArrayError, AxesError, ChunksError, InputError
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
    """Undo `fft`, as `numpy.fft.ifft` does. For parameters and errors see `fft`."""
    return _along_one("ifft", x, n, axis, norm, chunks)


def rfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Transform real numbers along one axis, to ``n // 2 + 1`` complex ones; else as `fft`."""
    return _along_one("rfft", x, n, axis, norm, chunks)


def irfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Undo `rfft`: `n` real numbers along the axis, by default an even number of them."""
    return _along_one("irfft", x, n, axis, norm, chunks)


def hfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Transform Hermitian numbers to `n` real ones, as `numpy.fft.hfft` does; else as `irfft`."""
    return _along_one("hfft", x, n, axis, norm, chunks)


def ihfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Undo `hfft`, as `numpy.fft.ihfft` does; else as `rfft`."""
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
        None and -1 stand for the axis as it is. By default all are as they are.
    axes : sequence of int, optional
        The axes, each once. By default all, or the last ``len(s)``. An empty sequence gives `x`.
    norm, chunks
        See `fft`.

    Returns
    -------
    dask.array.Array
        Lazy, of complex numbers of the precision of `x`, in blocks of its type.

    Raises
    ------
    UnsupportedArrayError, AxesError, ChunksError, InputError
        See `dask_p2p.fft`.

    Examples
    --------
    Slabs are cut along another axis afterwards, and inverted come back as they were:

    >>> import dask.array as da
    >>> y = fftn(da.ones((4, 6, 8), chunks=(2, 6, 8)))
    >>> y.chunks, ifftn(y).chunks
    (((4,), (3, 3), (8,)), ((2, 2), (6,), (8,)))
    """
    return transformed("fft", x, s, axes, norm, chunks)


def ifftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `fftn`, as `numpy.fft.ifftn` does. For parameters and errors see `fftn`."""
    return transformed("ifft", x, s, axes, norm, chunks)


def rfftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Transform real numbers: along the last of `axes` as `rfft`, the others as `fftn`."""
    return transformed("rfft", x, s, axes, norm, chunks)


def irfftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `rfftn`: real numbers, by default an even number of them along the last of `axes`.

    In `s`, None stands for that number, and -1 for the number of elements of `x` along the axis.
    """
    return transformed("irfft", x, s, axes, norm, chunks)


def fft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Do what `fftn` does, by default along the last two axes."""
    return fftn(x, s, axes, norm, chunks=chunks)


def ifft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Do what `ifftn` does, by default along the last two axes."""
    return ifftn(x, s, axes, norm, chunks=chunks)


def rfft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Do what `rfftn` does, by default along the last two axes."""
    return rfftn(x, s, axes, norm, chunks=chunks)


def irfft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Do what `irfftn` does, by default along the last two axes."""
    return irfftn(x, s, axes, norm, chunks=chunks)


def _along_one(
    kind: str, x: DaskArray, n: Length, axis: int, norm: Norm, chunks: ChunksLike
) -> DaskArray:
    length = None if n is None else checked_count("elements", n=n)
    return transformed(kind, x, (length,), (axis,), norm, chunks)
