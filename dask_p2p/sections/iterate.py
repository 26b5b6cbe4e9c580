"""`iterate`: a stencil that is applied again and again, on all workers at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import numpy as np

from dask_p2p.backends import backend_for
from dask_p2p.config import checked_options
from dask_p2p.errors import ChunksError, InputError, UnsupportedArrayError
from dask_p2p.inputs import checked_count, checked_flag
from dask_p2p.ops.arguments import check_function, check_names, is_dask_array
from dask_p2p.ops.rechunk import rechunk
from dask_p2p.ops.rims import checked_boundaries, checked_depths
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.sections.arguments import (
    check_computed,
    check_same_kind,
    check_shares,
    chosen_members,
)
from dask_p2p.sections.graph import section_arrays
from dask_p2p.sections.iteration import Iteration
from dask_p2p.sections.saved import checked_period
from dask_p2p.sections.staged import checked_order
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
    members: int | None = ...,
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
    members: int | None = ...,
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
    members: int | None = None,
    dtype: DTypeLike | None = None,
    capture: bool = False,
    **kwargs: Any,
) -> DaskArray | tuple[DaskArray, ...]:
    """Apply a function of blocks with rims again and again, exchanging the rims between workers.

    That is one layer of the graph for all steps. A member of each worker has one contiguous share
    of the array; a step costs what the function takes, and the exchange of rims.

    Parameters
    ----------
    func : callable
        ``func(*fields, *constants, out=out)`` fills `out`, a share without rims. Without a
        parameter `out` it returns the new share, with or without rims; that allocates in each step.
        Fields have rims of `depth` around them. They and constants are read-only: write into `out`,
        or into a copy. It must depend on nothing but what it is given. The first step checks it: it
        is called once more, or a few times, for the same step.
    x : dask.array.Array or sequence of them
        The field to begin with. Several are levels of time, the newest first: what `func` makes
        becomes the newest, and the oldest goes. Of one shape and chunks, in NumPy or CuPy blocks.
        With CuPy blocks `func` gets CuPy arrays, with a stream of the member's own as the current
        one, and need not wait for what it puts there.
    depth : int, tuple, dict or list
        Width of the rims, as `dask_p2p.map_overlap` takes it; in a list one for each field. Rims
        may be wider than a member's share.
    steps : int
        How often `func` is applied, at most. With 0 the fields come back as they are.
    boundary : str, scalar, tuple or dict, optional
        What lies beyond the ends of the array, as `dask_p2p.map_overlap` takes it: by default
        "periodic". With "none" shares at the ends have no rim there.
    constants : sequence, optional
        What `func` reads in each step beside the fields. Of Dask arrays, which have x's shape, a
        member gets its share, without rims; others are given as they are. All arrays are of the
        fields' kind, NumPy's or CuPy's.
    corners : bool, optional
        Whether rims reach round corners, by default True: right for all stencils. Stencils that
        are shaped like a star do not read corners. With False these are not exchanged where
        several axes are divided between members, and hold NaN, or zero for other dtypes. The first
        step then refuses a function whose results depend on them.
    overlap : bool or "auto", optional
        Whether `func` is applied to the inside of a share while rims are on their way, then to
        what is left, in two parts for each axis that is divided. It is called with parts then,
        and must give the same values for these. "auto", the default: where rims come from
        another host, and shares have at least 2**18 elements; of CuPy blocks where shares have
        at least 256 MiB.
    exchange : {"auto", "diagonal", "left-right", "pairwise"}
        In which order members exchange rims: see `dask_p2p.sections.Context.redistribute`.
    until : callable, optional
        ``until(*numbers)`` returns whether to stop. `func` returns the numbers, in a tuple after
        the new share if it returns that; they are summed over all members.
    check_every : int, optional
        After how many steps each `until` is asked, by default after each.
    checkpoint_every : int, str or None, optional
        After how many steps, or how much time, members keep copies of the fields on their own and
        on another worker. When a worker is lost, all go on from there; without, from the start.
    members : int, optional
        At most so many, and at most the blocks of the array. By default the workers of the current
        cluster that have the resources of `dask.annotate`; 1 without a cluster, with an
        asynchronous client, or in the function of another section, where there can be no more.
    dtype : dtype, optional
        Of the fields and the result, by default that of the first field. Integers with a function
        that makes fractions need it: ``dtype=float``.
    capture : bool, optional
        Whether steps are captured as a CUDA graph and replayed, so that a step costs the host next
        to nothing: for small shares, where that is most of it. `func` is called in the first steps
        only. It must put all its work on the current stream, read no memory of the host, and wait
        for nothing: the graph is compared with it once, bit by bit. Between members of one host
        that read each other's memory by CUDA IPC; others, and NumPy blocks, go on as without.
    **kwargs
        For `func`, as they are. Give it a keyword that `iterate` has too by `functools.partial`.

    Returns
    -------
    dask.array.Array, or tuple of them
        As many as fields, the newest first, with the chunks of `x`.

    Raises
    ------
    InputError
        If `func` cannot be called, a number is too small, or depth or boundary is nothing of the
        kind; or if constants or keywords have still to be computed, but for arrays. When it runs,
        if `func` writes into its fields or constants, or reads corners with ``corners=False``; or
        if `capture` is asked for, and `func` cannot be captured or gives other values then.
    ChunksError
        If chunk sizes are unknown, or differ between fields.
    UnsupportedArrayError
        If a field is no Dask array of NumPy or CuPy blocks, or has Python objects; or if arrays
        are of both kinds.
    BlockMismatchError
        When it runs, if `func` returns other values than one array and numbers for `until`, leaves
        elements of `out` as they were, or makes numbers that the dtype of the fields cannot hold.
    SectionError
        When it runs, if the members come to no end after `p2p.attempts` attempts, or the workers
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
    check_function(func, "fields with rims", "iterate(func, x, depth, steps)")
    count = sum(len(of) if isinstance(of, (list, tuple)) else 1 for of in (x, constants))
    check_names(func, count, iterate, locals())
    if until is not None and not callable(until):
        raise InputError(f"until: expected a function of numbers, got {until!r}.")
    if isinstance(boundary, list):
        raise InputError(
            f"boundary: expected one for all fields, got {boundary!r}. A field becomes the one "
            f"before the newest, so all have the same."
        )
    if depth is None:
        raise InputError(
            "depth: expected how many elements around a point the function reads, got None. Give "
            "0 if it reads none."
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
        chosen_members(first, members, None),
        [first.dtype] * len(fields),
        options,
    )
    return made[0] if is_dask_array(x) else made


def _checked_fields(x: Any, dtype: DTypeLike | None) -> list[Any]:
    """Return the fields, in the dtype that they all have."""
    fields = list(x) if isinstance(x, (list, tuple)) else [x]
    check_shares(fields)
    kind = np.dtype(fields[0].dtype if dtype is None else dtype)
    if kind.hasobject:
        raise UnsupportedArrayError(
            f"expected fields without Python objects, which members cannot exchange, got {kind}. "
            f"Convert them, x.astype(...)."
        )
    for field in fields if dtype is None else ():
        if not np.can_cast(field.dtype, kind, "same_kind"):
            raise InputError(
                f"expected fields that become {kind}, as the first one, got one of {field.dtype}. "
                f"Give the dtype of all fields, dtype={str(np.result_type(*fields))!r}."
            )
    return [field.astype(kind) for field in fields]


def _checked_constants(
    constants: Any, field: DaskArray
) -> tuple[tuple[tuple[bool, Any], ...], list[DaskArray]]:
    """Return for each constant whether it is divided, or what it is; and those that are."""
    if not isinstance(constants, (list, tuple)):
        raise InputError(
            f"constants: expected a tuple of what the function reads, got "
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
            f"shape {constant.shape}. Compute it first, if all members are to have the whole of it."
        )
    aligned = constant if constant.chunks == field.chunks else rechunk(constant, field.chunks)
    check_shares([aligned])
    return aligned
