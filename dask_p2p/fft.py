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
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import TypeVar

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

# fmt: off
__all__ = [
    "estimate", "fft", "fft2", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifft2",
    "ifftn", "ifftshift", "ihfft", "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftfreq",
    "rfftn",
]
# fmt: on


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


_ONE_AXIS = """\
n : int, optional
    Length of the transform: the axis is cropped, or padded with zeros.
    Default: {length}.
axis : int, optional
    Axis of the transform. Default: the last."""
_SEVERAL_AXES = """\
s : sequence of int, optional
    Lengths of the transform, one for each of `axes`: an axis is cropped, or padded with zeros.
    -1 is the length of `x` along the axis. None, the default, is
    {length}.
axes : sequence of int, optional
    Axes of the transform, each once. Default: {axes}."""
_DOCUMENTATION = """\
{summary}

Parameters
----------
x : dask.array.Array
    Array of {numbers}, in NumPy or CuPy blocks.
{parameters}
norm : {{"backward", "ortho", "forward"}}, optional
    Direction that is scaled. Default: "backward", the inverse.
chunks : int, str, tuple or dict, optional
    Chunks of the result, in any form that `dask.array.rechunk` takes. Default: those that need
    the fewest exchanges; for the result of an inverse, those before the transform.

Returns
-------
dask.array.Array
    Lazy array of {results} numbers, with the precision and block type of `x`.

Raises
------
UnsupportedArrayError
    If `x` is not a Dask array of numbers.
InputError
    If `x` lacks an axis, or an axis is given twice. If a length is below 1, or `norm` is no norm.
    If chunk sizes are unknown, or `chunks` does not fit the result.{error}

See Also
--------
{inverse} : The transform in the other direction.
estimate : The exchanges and the memory of a result.
numpy.fft.{name} : The same function of NumPy arrays.

Examples
--------
>>> import dask.array as da
>>> from dask_p2p import fft
>>> {example}
"""
_Function = TypeVar("_Function", bound=Callable[..., DaskArray])


def _documented(transform: _Function) -> _Function:
    """Put the text of all transforms between the summary and the example of a docstring."""
    if transform.__doc__ is None:  # python -OO
        return transform
    name = transform.__name__
    kind = name.rstrip("2n")
    summary, _, example = cleandoc(transform.__doc__).partition("\n\n>>> ")
    is_real, length = kind in ("rfft", "ihfft"), "that of `x`"
    if kind in ("irfft", "hfft"):
        length = "``2 * (m - 1)`` for m elements of `x`"
        length += "" if name == kind else " along the last of `axes`, that of `x` along others"
    transform.__doc__ = _DOCUMENTATION.format(
        summary=summary,
        numbers="real numbers" if is_real else "numbers",
        parameters=(_ONE_AXIS if name == kind else _SEVERAL_AXES).format(
            length=length,
            axes="the last two" if name.endswith("2") else "all axes, or the last ``len(s)``",
        ),
        results="real" if kind in ("irfft", "hfft") else "complex",
        error=" If `x` is complex." if is_real else "",
        inverse=name[1:] if name.startswith("i") else f"i{name}",
        name=name,
        example=example,
    )
    return transform


@_documented
def fft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Transform along one axis, as `numpy.fft.fft` does.

    >>> x = da.ones((4, 6), chunks=(4, 3))
    >>> fft.fft(x).chunks
    ((2, 2), (6,))
    """
    return _along_one("fft", x, n, axis, norm, chunks)


@_documented
def ifft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Undo `fft`, as `numpy.fft.ifft` does.

    >>> y = fft.fft(da.ones(3, chunks=1))
    >>> fft.ifft(y).real.compute()
    array([1., 1., 1.])
    """
    return _along_one("ifft", x, n, axis, norm, chunks)


@_documented
def rfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Transform real numbers along one axis to ``n // 2 + 1`` complex ones.

    >>> fft.rfft(da.ones(6, chunks=3)).shape
    (4,)
    """
    return _along_one("rfft", x, n, axis, norm, chunks)


@_documented
def irfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Undo `rfft`: return `n` real numbers along the axis, by default an even number.

    >>> y = fft.rfft(da.ones(5, chunks=5))
    >>> fft.irfft(y).shape, fft.irfft(y, n=5).shape
    ((4,), (5,))
    """
    return _along_one("irfft", x, n, axis, norm, chunks)


@_documented
def hfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Transform Hermitian numbers to `n` real ones, by default an even number.

    `x` has the first half of the numbers, as for `irfft`.

    >>> fft.hfft(da.ones(4, chunks=2)).shape
    (6,)
    """
    return _along_one("hfft", x, n, axis, norm, chunks)


@_documented
def ihfft(
    x: DaskArray, n: Length = None, axis: int = -1, norm: Norm = None, *, chunks: ChunksLike = None
) -> DaskArray:
    """Undo `hfft`: transform real numbers to ``n // 2 + 1`` complex ones.

    >>> fft.ihfft(da.ones(6, chunks=3)).shape
    (4,)
    """
    return _along_one("ihfft", x, n, axis, norm, chunks)


@_documented
def fftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Transform along several axes, as `numpy.fft.fftn` does.

    The transform of slabs has slabs along another axis, and its inverse the original chunks. With
    an empty sequence of axes the result is `x`.

    >>> y = fft.fftn(da.ones((4, 6, 8), chunks=(2, 6, 8)))
    >>> y.chunks, fft.ifftn(y).chunks
    (((4,), (3, 3), (8,)), ((2, 2), (6,), (8,)))
    """
    return transform_array("fft", x, s, axes, norm, chunks)


@_documented
def ifftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `fftn`, as `numpy.fft.ifftn` does.

    >>> y = fft.fftn(da.ones((4, 6), chunks=(2, 6)))
    >>> fft.ifftn(y, chunks=(4, 2)).chunks
    ((4,), (2, 2, 2))
    """
    return transform_array("ifft", x, s, axes, norm, chunks)


@_documented
def rfftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Transform real numbers: as `rfft` along the last of `axes`, as `fftn` along the others.

    >>> fft.rfftn(da.ones((4, 6), chunks=(2, 6))).chunks
    ((4,), (2, 2))
    """
    return transform_array("rfft", x, s, axes, norm, chunks)


@_documented
def irfftn(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = None,
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `rfftn`: return real numbers, by default an even number along the last of `axes`.

    >>> y = fft.rfftn(da.ones((4, 5), chunks=(2, 5)))
    >>> fft.irfftn(y, s=(4, 5)).chunks
    ((2, 2), (5,))
    """
    return transform_array("irfft", x, s, axes, norm, chunks)


@_documented
def fft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Transform along two axes, by default the last two.

    >>> fft.fft2(da.ones((2, 4, 6), chunks=(1, 4, 6))).chunks
    ((1, 1), (4,), (6,))
    """
    return fftn(x, s, axes, norm, chunks=chunks)


@_documented
def ifft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `fft2`: `ifftn` along two axes, by default the last two.

    >>> y = fft.fft2(da.ones((4, 6), chunks=(2, 6)))
    >>> fft.ifft2(y).chunks
    ((2, 2), (6,))
    """
    return ifftn(x, s, axes, norm, chunks=chunks)


@_documented
def rfft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Transform real numbers along two axes, by default the last two, as `rfftn` does.

    >>> fft.rfft2(da.ones((4, 6), chunks=(2, 6))).shape
    (4, 4)
    """
    return rfftn(x, s, axes, norm, chunks=chunks)


@_documented
def irfft2(
    x: DaskArray,
    s: Lengths = None,
    axes: Axes = (-2, -1),
    norm: Norm = None,
    *,
    chunks: ChunksLike = None,
) -> DaskArray:
    """Undo `rfft2`: `irfftn` along two axes, by default the last two.

    >>> y = fft.rfft2(da.ones((4, 6), chunks=(2, 6)))
    >>> fft.irfft2(y).dtype
    dtype('float64')
    """
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

    See Also
    --------
    dask_p2p.estimate : The memory of other operations.
    """
    return estimate_exchanges(y, workers)
