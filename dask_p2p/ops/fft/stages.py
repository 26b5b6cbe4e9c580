"""Transforms of Dask arrays, stage by stage: the common code of the functions of `dask_p2p.fft`."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import replace
from math import prod
from numbers import Real
from operator import index
from typing import Any, Literal, TypeAlias

import numpy as np
from dask.array.utils import asarray_safe, meta_from_array

from dask_p2p.backends import backend_for
from dask_p2p.config import checked_options
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.geometry import Chunks
from dask_p2p.graph import (
    Epilogue,
    array_of_plan,
    fix_blocks,
    functions_of,
    is_dask_array,
    redistribute,
)
from dask_p2p.inputs import checked_count
from dask_p2p.ops.arguments import (
    check_array,
    check_chunks_are_known,
    check_known_array,
    checked_chunks,
)
from dask_p2p.ops.fft.local import (
    INVERSE,
    TO_COMPLEX,
    TO_REAL,
    LocalTransform,
    Step,
    complex_dtype,
    find_input_chunks,
    run_stage,
)
from dask_p2p.ops.fft.long_axes import LongAxis, find_long, transform_long_axis
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plans import GridPlan
from dask_p2p.plans.fft import FftStage, RolledAxis, Transform, plan_stages
from dask_p2p.plans.grid import SplitAxis
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.types import ChunksLike, DaskArray

Norm: TypeAlias = Literal["backward", "ortho", "forward"] | None
Length: TypeAlias = int | None
Lengths: TypeAlias = Sequence[Length] | None
Axes: TypeAlias = Sequence[int] | None

_NORMS = ("backward", "ortho", "forward")


def transform_array(
    kind: str, x: DaskArray, s: Lengths, axes: Axes, norm: Norm, chunks: ChunksLike
) -> DaskArray:
    """Return the transform of `x`: `kind` along the last axis, complex along the others."""
    _check_numbers(x, kind)
    check_norm(norm)
    along, lengths = _checked_lengths(kind, x, s, axes)
    if not along:
        return x if chunks is None else rechunk(x, chunks)
    if chunks is not None or any(len(x.chunks[axis]) > 1 for axis in along):
        check_chunks_are_known(x)
    special = None if kind in ("fft", "ifft") else along[-1]
    cropped = dict(lengths)
    if special is not None and kind in TO_REAL:
        cropped[special] = lengths[special] // 2 + 1
    if any(n < x.shape[axis] for axis, n in cropped.items()):
        x = x[tuple(slice(cropped.get(axis)) for axis in range(x.ndim))]
    between = complex_dtype(x.dtype)
    transform = plan_transform(kind, special, lengths, (x.dtype.itemsize, between.itemsize))
    # Unknown chunk sizes remain unknown where no exchange is needed.
    before = tuple(tuple(n if n != n else int(n) for n in sizes) for sizes in x.chunks)
    path = plan_stages(before, transform)
    natural = transform.after(path[-1].chunks, frozenset(path[-1].axes))
    final = None if chunks is None else checked_chunks(chunks, natural, between)
    # GPU memory has room for larger blocks than Dask's option allows; long axes are untested there.
    long = None if backend_for(x._meta).on_device else find_long(path, lengths, between.itemsize)
    if long is not None and (final is None or len(final[long.axis]) > 1):
        x = _transform_with_long_axis(kind, x, along, lengths, long, norm)
        return redistribute(x, tuple(range(x.ndim)), final or x.chunks)
    if final is None and transform.is_inverse:
        final = _restore_chunks(x, natural)
    if final not in (None, natural):
        longer = plan_stages(before, transform, final)
        path = path if chunks is None and len(longer) > len(path) else longer
    on_device = backend_for(x._meta).on_device
    stage_axes = [stage.axes for stage in path]
    local_steps = plan_local_transforms(kind, special, lengths, norm, stage_axes, on_device)
    for number, (stage, local) in enumerate(zip(path, local_steps, strict=True)):
        x = _run_stage(x, stage, transform, local, is_first=number == 0)
    return x


def plan_transform(
    kind: str, special: int | None, lengths: dict[int, int], item_bytes: tuple[int, int]
) -> Transform:
    """Return the planner's `Transform`; `special` is the only axis that `kind` transforms."""
    after = dict(lengths)
    if special is not None and kind in TO_COMPLEX:
        after[special] = lengths[special] // 2 + 1
    return Transform(
        after,
        first=special if kind in TO_COMPLEX else None,
        last=special if kind in TO_REAL else None,
        item_bytes=item_bytes,
        is_inverse=kind in INVERSE,
    )


def _restore_chunks(x: DaskArray, natural: Chunks) -> Chunks | None:
    before = find_input_chunks(x)
    if before is None or len(before) != len(natural):
        return None
    partitions = tuple(
        (sum(sizes),) if len(old) == 1 else old for old, sizes in zip(before, natural, strict=True)
    )
    return (
        partitions
        if all(sum(a) == sum(b) for a, b in zip(partitions, natural, strict=True))
        else None
    )


def _transform_with_long_axis(
    kind: str,
    x: DaskArray,
    along: tuple[int, ...],
    lengths: dict[int, int],
    long: LongAxis,
    norm: Norm,
) -> DaskArray:
    short_axes = tuple(axis for axis in along if axis != long.axis)
    is_special = along[-1] == long.axis
    plain = "ifft" if kind in INVERSE else "fft"

    def by_stages(x: DaskArray) -> DaskArray:
        n = [lengths[axis] for axis in short_axes]
        short_kind = plain if is_special else kind
        return transform_array(short_kind, x, n, short_axes, norm, None) if n else x

    def by_matrix(x: DaskArray) -> DaskArray:
        return transform_long_axis(kind if is_special else plain, x, long, norm or "backward")

    # Real-to-complex transforms come first, complex-to-real ones last.
    if is_special == (kind in TO_COMPLEX):
        return by_stages(by_matrix(x))
    return by_matrix(by_stages(x))


def check_norm(norm: Any) -> None:
    """Raise `InputError` if `norm` is not a norm of `numpy.fft`."""
    if norm not in (None, *_NORMS):
        raise InputError(f"expected a norm of {_NORMS}, or None for the first, got norm={norm!r}.")


def _check_numbers(x: DaskArray, kind: str) -> None:
    check_array(x)
    if x.dtype.kind not in "biufc":
        raise UnsupportedArrayError(
            f"expected an array of numbers, got dtype {x.dtype}. Convert it with x.astype(float)."
        )
    if kind in TO_COMPLEX and x.dtype.kind == "c":
        raise InputError(
            f"expected real numbers for {kind}, got dtype {x.dtype}. Pass x.real, or use the "
            f"transform of complex numbers."
        )


def checked_numbered_axes(axes: Any, ndim: int) -> tuple[int, ...]:
    """Return `axes` without negative numbers; raise `InputError` unless each is there once."""
    try:
        numbers = tuple(index(axis) for axis in axes)
    except TypeError:
        numbers = ()
    along = tuple(axis % ndim for axis in numbers if -ndim <= axis < ndim)
    if not along or len({*along}) < len(numbers):
        raise InputError(
            f"expected axes of an array of {ndim} dimensions, each once, got axes={axes!r}. Number "
            f"axes from 0, or backwards from -1."
        )
    return along


def _checked_lengths(
    kind: str, x: DaskArray, s: Lengths, axes: Axes
) -> tuple[tuple[int, ...], dict[int, int]]:
    if not isinstance(s, (Sequence, type(None))):
        raise InputError(f"expected a sequence of lengths, one for each axis, got s={s!r}.")
    if axes is None:
        axes = range(x.ndim) if s is None else range(-len(s), 0)
    is_plain = kind in ("fft", "ifft")  # without axes it returns x, as in NumPy
    is_without = is_plain and isinstance(axes, Sized) and not len(axes)
    along = () if is_without else checked_numbered_axes(axes, x.ndim)
    if s is not None and len(s) != len(along):
        raise InputError(f"expected a length for each of the axes {along}, got s={s!r}.")
    lengths = {}
    for axis, n in zip(along, s or (None,) * len(along), strict=True):
        if x.shape[axis] != x.shape[axis]:  # nan: unknown
            check_chunks_are_known(x)
        if n is None and kind in TO_REAL and axis == along[-1]:
            n = 2 * (x.shape[axis] - 1)
        elif n is None or n == -1:
            n = x.shape[axis]
        lengths[axis] = checked_count(f"elements along axis {axis}", n=n)
    return along, lengths


def plan_local_transforms(
    kind: str,
    special: int | None,
    lengths: dict[int, int],
    norm: Norm,
    stages: Sequence[tuple[int, ...]],
    on_device: bool,
) -> list[LocalTransform | None]:
    """Return the transform of blocks at each stage; None for a stage without axes."""
    norm = norm or "backward"
    elements = prod(lengths.values())
    total_scale = 1 / elements if (norm == "forward") != (kind in INVERSE) else 1.0
    if norm == "ortho":
        total_scale = float(elements**-0.5)
    # Scale in the first stage: readers fetch finished blocks while later ones are scaled.
    first = min((number for number, axes in enumerate(stages) if axes), default=0)
    return [
        LocalTransform(
            _steps_along(kind, special, axes, lengths),
            norm,
            scale=(total_scale if number == first else 1.0) if on_device else None,
        )
        if axes
        else None
        for number, axes in enumerate(stages)
    ]


def _steps_along(
    kind: str, special: int | None, axes: tuple[int, ...], lengths: dict[int, int]
) -> tuple[Step, ...]:
    complex_axes = tuple(axis for axis in axes if axis != special)
    name = "ifftn" if kind in INVERSE else "fftn"
    steps: list[Step] = []
    if complex_axes:
        steps.append((name, complex_axes, tuple(lengths[axis] for axis in complex_axes)))
    if special in axes:
        steps.insert(0 if kind in TO_COMPLEX else 1, (kind, (special,), (lengths[special],)))
    return tuple(steps)


def order_in_memory(ndim: int, local: LocalTransform, on_device: bool) -> tuple[int, ...]:
    """Return the order of all axes in memory of an assembled block that is transformed."""
    order = tuple(range(ndim))
    # On CPUs, copies without a permutation gain more.
    return local.best_order(order) if on_device else order


def _run_stage(
    x: DaskArray,
    stage: FftStage,
    transform: Transform,
    local: LocalTransform | None,
    is_first: bool,
) -> DaskArray:
    if local is None:
        return x if is_first else redistribute(x, tuple(range(x.ndim)), stage.chunks)
    transformed_axes = frozenset(stage.axes)
    dtype = complex_dtype(x.dtype)
    if transform.last in transformed_axes:
        dtype = np.empty((), dtype).real.dtype
    meta = x._meta.real if transform.last in transformed_axes else x._meta
    meta = meta_from_array(meta, x.ndim, dtype)
    after = transform.after(stage.chunks, transformed_axes)
    if is_first:
        map_blocks = functions_of(x).map_blocks
        fixed = fix_blocks(x)
        spectrum: DaskArray = map_blocks(local, fixed, chunks=after, dtype=dtype, meta=meta)
        return spectrum
    order = order_in_memory(x.ndim, local, backend_for(x._meta).on_device)
    return run_stage(x, stage.chunks, order, Epilogue(replace(local, order=order), after, meta))


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
    UnsupportedArrayError
        If `x` is not a Dask array.
    InputError
        If `x` lacks an axis, chunk sizes are unknown, or `chunks` does not fit the result.

    See Also
    --------
    ifftshift : The shift back.

    Examples
    --------
    >>> fftshift(fftfreq(4, chunks=2)).compute()
    array([-0.5 , -0.25,  0.  ,  0.25])
    """
    return _roll(x, axes, 1, chunks)


def ifftshift(x: DaskArray, axes: int | Axes = None, *, chunks: ChunksLike = None) -> DaskArray:
    """Undo `fftshift`: move the zero frequency to the front.

    Parameters
    ----------
    x, axes, chunks
        The arguments of `fftshift`.

    Returns
    -------
    dask.array.Array
        Lazy array with the dtype and block type of `x`.

    Raises
    ------
    UnsupportedArrayError, InputError
        The errors of `fftshift`.

    See Also
    --------
    fftshift : The shift forth.

    Examples
    --------
    >>> ifftshift(fftshift(fftfreq(4, chunks=2))).compute()
    array([ 0.  ,  0.25, -0.5 , -0.25])
    """
    return _roll(x, axes, -1, chunks)


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
        Also if `chunks` does not fit the result.

    See Also
    --------
    rfftfreq : The frequencies of `rfft`.

    Examples
    --------
    >>> fftfreq(4, d=0.5, chunks=2).compute()
    array([ 0. ,  0.5, -1. , -0.5])
    """
    n = _checked_samples(n, d)
    numbers = _arange(n, chunks, like)
    return numbers.map_blocks(_to_frequencies, n, 1.0 / (n * d), meta=numbers._meta.astype(float))


def rfftfreq(n: int, d: float = 1.0, *, chunks: ChunksLike = "auto", like: Any = None) -> DaskArray:
    """Return the frequencies of `rfft`, as `numpy.fft.rfftfreq` does.

    Parameters
    ----------
    n, d, chunks, like
        The arguments of `fftfreq`.

    Returns
    -------
    dask.array.Array
        Lazy array of ``n // 2 + 1`` numbers.

    Raises
    ------
    InputError
        As `fftfreq`.

    See Also
    --------
    fftfreq : The frequencies of `fft`.

    Examples
    --------
    >>> rfftfreq(4, d=0.5, chunks=2).compute()
    array([0. , 0.5, 1. ])
    """
    n = _checked_samples(n, d)
    return _arange(n // 2 + 1, chunks, like) * (1.0 / (n * d))


def _arange(count: int, chunks: ChunksLike, like: Any) -> DaskArray:
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
    return numbers.map_blocks(asarray_safe, like=meta, dtype=numbers.dtype, meta=meta)


def _checked_samples(n: int, d: Any) -> int:
    if not isinstance(d, (Real, np.number)) or d == 0 or d != d:
        raise InputError(f"expected a sample spacing, a number other than 0, got d={d!r}.")
    return checked_count("elements", n=n)


def _to_frequencies(numbers: Any, n: int, step: float) -> Any:
    return ((numbers + n // 2) % n - n // 2) * step


def _roll(x: DaskArray, axes: int | Axes, sign: int, chunks: ChunksLike) -> DaskArray:
    check_known_array(x)
    along = range(x.ndim) if axes is None else checked_numbered_axes(np.atleast_1d(axes), x.ndim)
    before = tuple(tuple(map(int, sizes)) for sizes in x.chunks)
    after = before if chunks is None else checked_chunks(chunks, before, x.dtype)
    mappings: list[SplitAxis] = []
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        shift = sign * (sum(old) // 2) if axis in along else 0
        mappings.append(RolledAxis(old, new, shift) if shift else SplitAxis(old, new))
    if after == before and not any(isinstance(mapping, RolledAxis) for mapping in mappings):
        return x
    register_if_possible()
    plan = GridPlan(tuple(range(x.ndim)), tuple(mappings))
    return array_of_plan("p2p-fftshift", x, plan, checked_options())
