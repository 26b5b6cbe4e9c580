"""`iterate`: a stencil that is applied repeatedly, on all workers at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import numpy as np

from dask_p2p.backends import backend_for
from dask_p2p.config import checked_options
from dask_p2p.errors import ChunksError, InputError, UnsupportedArrayError
from dask_p2p.inputs import checked_count, checked_flag
from dask_p2p.ops.arguments import check_function, check_names, is_dask_array
from dask_p2p.ops.halo import checked_boundaries, checked_depths
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.sections.api.arguments import (
    check_computed,
    check_decompositions,
    check_same_kind,
    chosen_ranks,
)
from dask_p2p.sections.api.graph import section_arrays
from dask_p2p.sections.exchange.staged import checked_order
from dask_p2p.sections.gang.checkpoints import checked_period
from dask_p2p.sections.iterate.iteration import Iteration
from dask_p2p.types import BoundaryLike, DaskArray, DepthLike, DTypeLike


@overload
def iterate(
    func: Callable[..., Any],
    x: Sequence[DaskArray],
    /,
    depth: DepthLike,
    steps: int,
    *,
    boundary: BoundaryLike = ...,
    constants: Sequence[Any] = ...,
    corners: bool = ...,
    overlap: bool | Literal["auto"] = ...,
    exchange: str = ...,
    until: Callable[..., bool] | None = ...,
    check_every: int = ...,
    checkpoint_every: int | str | None = ...,
    ranks: int | None = ...,
    dtype: DTypeLike | None = ...,
    capture: bool = ...,
    **kwargs: Any,
) -> tuple[DaskArray, ...]: ...


@overload
def iterate(
    func: Callable[..., Any],
    x: DaskArray,
    /,
    depth: DepthLike,
    steps: int,
    *,
    boundary: BoundaryLike = ...,
    constants: Sequence[Any] = ...,
    corners: bool = ...,
    overlap: bool | Literal["auto"] = ...,
    exchange: str = ...,
    until: Callable[..., bool] | None = ...,
    check_every: int = ...,
    checkpoint_every: int | str | None = ...,
    ranks: int | None = ...,
    dtype: DTypeLike | None = ...,
    capture: bool = ...,
    **kwargs: Any,
) -> DaskArray: ...


def iterate(
    func: Callable[..., Any],
    x: DaskArray | Sequence[DaskArray],
    /,
    depth: DepthLike,
    steps: int,
    *,
    boundary: BoundaryLike = "periodic",
    constants: Sequence[Any] = (),
    corners: bool = True,
    overlap: bool | Literal["auto"] = "auto",
    exchange: str = "auto",
    until: Callable[..., bool] | None = None,
    check_every: int = 1,
    checkpoint_every: int | str | None = "30 s",
    ranks: int | None = None,
    dtype: DTypeLike | None = None,
    capture: bool = False,
    **kwargs: Any,
) -> DaskArray | tuple[DaskArray, ...]:
    """Apply a function repeatedly to blocks with a halo, and exchange halos between workers.

    All steps are one layer of the graph. Each worker runs a rank, which has one contiguous local
    block of the array. A step costs the time of the function and of the halo exchange.

    Parameters
    ----------
    func : callable
        ``func(*fields, *constants, out=out)`` fills `out`, a local block without a halo. Without a
        parameter `out` it returns the new local block, with or without a halo, which allocates
        memory in each step. Fields have a halo of width `depth`. Fields and constants are
        read-only: write into `out`, or into a copy. The result must depend on the arguments alone.
        The first step checks the function, and calls it one or more times again for that.
    x : dask.array.Array or sequence of them
        The initial field. Several fields are time levels, the newest first: the result of `func`
        becomes the newest, and the oldest is dropped. All have the same shape and chunks, in NumPy
        or CuPy blocks. With CuPy blocks `func` receives CuPy arrays, and the rank's own stream is
        the current one. It need not wait for work on that stream.
    depth : int, tuple, dict or list
        Width of the halo, as for `dask_p2p.map_overlap`; in a list one for each field. A halo may
        be wider than a local block.
    steps : int
        Largest number of applications of `func`. With 0 the fields are returned unchanged.
    boundary : str, scalar, tuple or dict, optional
        Values beyond the ends of the array, as for `dask_p2p.map_overlap`: by default "periodic".
        With "none" local blocks at the ends have no halo there.
    constants : sequence, optional
        Further arguments, which `func` reads in each step. A Dask array must have the shape of
        the fields. Each rank receives its local block, without a halo. Other values are passed
        unchanged. All arrays are of the fields' kind, NumPy or CuPy.
    corners : bool, optional
        If True, the default, the halo includes corners: right for all stencils. A star-shaped
        stencil does not read corners. With False they are not exchanged where several axes are
        divided between ranks, and hold NaN, or zero if the dtype has no NaN. The first step then
        refuses a function whose results depend on them.
    overlap : bool or "auto", optional
        If True, `func` computes the interior of a local block while the halo is in flight, and then
        the boundary, in two parts for each divided axis. It must return the same values for such
        parts. "auto", the default, overlaps if halos come from another host and local blocks have
        at least 2**18 elements. For CuPy blocks it overlaps if local blocks have at least 256 MiB.
    exchange : {"auto", "diagonal", "left-right", "pairwise"}, optional
        Order of messages in halo exchanges: see `dask_p2p.sections.Context.redistribute`.
    until : callable, optional
        ``until(*numbers)`` returns whether to stop. `func` returns the numbers, in a tuple after
        the new local block if it returns one. They are summed over all ranks.
    check_every : int, optional
        Number of steps between calls of `until`, by default 1.
    checkpoint_every : int, str or None, optional
        Number of steps, or time, between checkpoints. For a checkpoint each rank keeps a copy of
        its fields on its own worker and on another one. After the loss of a worker all ranks resume
        from the last checkpoint; without one, from the start.
    ranks : int, optional
        Largest number of ranks; there are never more than blocks of the array. By default one for
        each worker of the current cluster that has the resources of `dask.annotate`. It is 1
        without a cluster, with an asynchronous client, or in the function of another section. There
        it cannot be larger.
    dtype : dtype, optional
        Dtype of the fields and the result, by default that of the first field. Give it if the
        fields are integers and the function makes fractions: ``dtype=float``.
    capture : bool, optional
        If True, steps are captured as a CUDA graph and replayed, so that a step costs the host next
        to nothing. This helps with small local blocks, where the host takes most of the time.
        `func` is called in the first steps only. It must enqueue all its work on the current
        stream, read no host memory, and wait for nothing. Its results and the graph's are compared
        once, bit by bit. All ranks must be on one host, and read each other's memory by CUDA IPC.
        Otherwise, and for NumPy blocks, steps are not captured.
    **kwargs
        Keywords for `func`, passed unchanged. Use `functools.partial` for a keyword that `iterate`
        has too.

    Returns
    -------
    dask.array.Array, or tuple of them
        One array for each field, the newest first, with the chunks of `x`.

    Raises
    ------
    InputError
        If `func` cannot be called, a number is too small, or `depth` or `boundary` is invalid. Also
        if a constant or a keyword is lazy; only constants may be Dask arrays. When it runs, if
        `func` writes into its fields or constants, or reads corners with ``corners=False``. Also if
        `capture` is set, and `func` cannot be captured or then gives other values.
    ChunksError
        If chunk sizes are unknown, or differ between fields.
    UnsupportedArrayError
        If a field is no Dask array of NumPy or CuPy blocks, or has Python objects; or if arrays
        are of both kinds.
    BlockMismatchError
        When it runs, if `func` returns other values than one array and the numbers for `until`.
        Also if it leaves elements of `out` unset, or makes numbers that the fields' dtype cannot
        hold.
    SectionError
        When it runs, if the ranks do not finish within `p2p.attempts` attempts, or if the workers
        can never run all of them at the same time.

    Examples
    --------
    >>> import dask.array as da
    >>> def smooth(u, out):
    ...     out[:] = (u[:-2] + u[2:]) / 2
    >>> x = da.arange(6, chunks=3, dtype=float)
    >>> iterate(smooth, x, depth=1, steps=2, boundary="nearest").compute(scheduler="sync")
    array([0.75, 1.25, 2.  , 3.  , 3.75, 4.25])
    """
    check_function(func, "fields with a halo", "iterate(func, x, depth, steps)")
    count = sum(len(of) if isinstance(of, (list, tuple)) else 1 for of in (x, constants))
    check_names(func, count, iterate, locals())
    if until is not None and not callable(until):
        raise InputError(f"until: expected a function of numbers, got {until!r}.")
    if isinstance(boundary, list):
        raise InputError(
            f"boundary: expected one for all fields, which are time levels of one field, got "
            f"{boundary!r}. Give one boundary instead of a list."
        )
    if depth is None:
        raise InputError(
            "depth: expected the number of elements around a point that the function reads, got "
            "None. Give 0 if it reads none."
        )
    if overlap != "auto":
        overlap = checked_flag("overlap", overlap, "True, False or 'auto'")
    fields = _checked_fields(x, dtype)
    first, shapes = fields[0], [field.shape for field in fields]
    given, arrays = _checked_constants(constants, first)
    check_computed(*(value for _, value in given), *kwargs.values())
    iteration = Iteration(
        function=func,
        depths=tuple(checked_depths(depth, shapes)),
        steps=checked_count("steps", 0, steps=steps),
        dtype=first.dtype,
        boundary=checked_boundaries(boundary, shapes, first.dtype)[0],
        corners=checked_flag("corners", corners),
        overlap=overlap,
        exchange=checked_order(exchange),
        constants=given,
        until=until,
        check_every=checked_count("steps", check_every=check_every),
        period=checked_period(checkpoint_every),
        capture=checked_flag("capture", capture),
        kwargs=kwargs,
    )
    options = checked_options()
    register_if_possible()
    made = section_arrays(
        "p2p-iterate",
        iteration,
        [*fields, *arrays],
        chosen_ranks(first, ranks, None),
        [first.dtype] * len(fields),
        options,
    )
    return made[0] if is_dask_array(x) else made


def _checked_fields(x: Any, dtype: DTypeLike | None) -> list[Any]:
    """Return the fields, converted to their common dtype."""
    fields = list(x) if isinstance(x, (list, tuple)) else [x]
    check_decompositions(fields)
    kind = np.dtype(fields[0].dtype if dtype is None else dtype)
    if kind.hasobject:
        raise UnsupportedArrayError(
            f"expected fields without Python objects, which ranks cannot exchange, got {kind}. "
            f"Convert them, x.astype(...)."
        )
    for field in fields if dtype is None else ():
        if not np.can_cast(field.dtype, kind, "same_kind"):
            raise InputError(
                f"expected fields that become {kind}, like the first one, got one of "
                f"{field.dtype}. Give a dtype for all fields, "
                f"dtype={str(np.result_type(*fields))!r}."
            )
    return [field.astype(kind) for field in fields]


def _checked_constants(
    constants: Any, field: DaskArray
) -> tuple[tuple[tuple[bool, Any], ...], list[DaskArray]]:
    """Return whether each constant is divided, with its value if not; and the divided arrays."""
    if not isinstance(constants, (list, tuple)):
        raise InputError(
            f"constants: expected a tuple of arguments for the function, got "
            f"{type(constants).__name__}. Give one as (constant,)."
        )
    backend = backend_for(field._meta)
    for constant in constants:
        check_same_kind(backend, getattr(constant, "_meta", constant), "a constant")
    given = tuple((True, None) if is_dask_array(c) else (False, c) for c in constants)
    return given, [_aligned(each, field) for each in constants if is_dask_array(each)]


def _aligned(constant: DaskArray, field: DaskArray) -> DaskArray:
    if constant.shape != field.shape:
        raise ChunksError(
            f"constants: expected Dask arrays of the fields' shape, {field.shape}, got one of "
            f"shape {constant.shape}. Compute it first if each rank needs the whole array."
        )
    aligned = constant if constant.chunks == field.chunks else rechunk(constant, field.chunks)
    check_decompositions([aligned])
    return aligned
