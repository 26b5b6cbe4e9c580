"""`spmd`: a function that runs on all workers at the same time, and exchanges data meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np

from dask_p2p.config import checked_options
from dask_p2p.errors import InputError
from dask_p2p.inputs import checked_count
from dask_p2p.ops.arguments import check_function, check_names, is_dask_array
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.sections.arguments import check_computed, check_shares, chosen_members
from dask_p2p.sections.context import Context
from dask_p2p.sections.graph import Shares, ValueSpec, section_arrays
from dask_p2p.types import DaskArray, DTypeLike


@overload
def spmd(
    func: Callable[..., Any],
    /,
    *arrays: DaskArray,
    outputs: Literal[1] = ...,
    cut: Sequence[int] | None = ...,
    members: int | None = ...,
    dtype: DTypeLike | None = ...,
    per_member: tuple[()] = ...,
    **kwargs: Any,
) -> DaskArray: ...


@overload
def spmd(
    func: Callable[..., Any],
    /,
    *arrays: DaskArray,
    outputs: Literal[1] = ...,
    cut: Sequence[int] | None = ...,
    members: int | None = ...,
    dtype: DTypeLike | None = ...,
    per_member: Sequence[Any],
    **kwargs: Any,
) -> tuple[DaskArray, ...]: ...


@overload
def spmd(
    func: Callable[..., Any],
    /,
    *arrays: DaskArray,
    outputs: Literal[2, 3, 4, 5, 6, 7, 8],
    cut: Sequence[int] | None = ...,
    members: int | None = ...,
    dtype: DTypeLike | None = ...,
    per_member: Sequence[Any] = ...,
    **kwargs: Any,
) -> tuple[DaskArray, ...]: ...


# How many there are, one or a tuple, is known when it runs.
@overload
def spmd(
    func: Callable[..., Any],
    /,
    *arrays: DaskArray,
    outputs: int,
    cut: Sequence[int] | None = ...,
    members: int | None = ...,
    dtype: DTypeLike | None = ...,
    per_member: Sequence[Any] = ...,
    **kwargs: Any,
) -> DaskArray | Any: ...


def spmd(
    func: Callable[..., Any],
    /,
    *arrays: DaskArray,
    outputs: int = 1,
    cut: Sequence[int] | None = None,
    members: int | None = None,
    dtype: DTypeLike | Sequence[DTypeLike] | None = None,
    per_member: Sequence[Any] = (),
    **kwargs: Any,
) -> DaskArray | tuple[DaskArray, ...]:
    """Run a function on all workers at the same time: ``func(ctx, *shares, **kwargs)``.

    Each run of the function, a *member*, has one contiguous share of each array, which it may
    change, and exchanges data with the others by the methods of `ctx`, a
    `dask_p2p.sections.Context`. All members must call the same methods in the same order. If a
    worker is lost meanwhile, all members run again.

    Parameters
    ----------
    func : callable
        Must depend on nothing but its arguments, and what the context returns. Returns an array of
        its share's shape.
    *arrays : dask.array.Array
        Of the same chunks, in NumPy or CuPy blocks. With CuPy blocks `func` gets and returns CuPy
        arrays; a stream of the member's own is the current one, and nothing has to be waited for.
    outputs : int, optional
        How many arrays `func` returns, in a tuple if not one; 0 if it returns what `per_member`
        says alone.
    cut : sequence of int, optional
        Axes that may be divided between members. By default all.
    members : int, optional
        At most so many, and at most the blocks of the array. By default the workers of the current
        cluster that have the resources of `dask.annotate`; 1 without a cluster, with an
        asynchronous client, or in the function of another section, where there can be no more.
    dtype : dtype or sequence of dtype, optional
        Of all outputs, or a tuple with one for each output. By default each output has the dtype
        of the array in its place, or of the first array if there are more outputs than arrays. Only
        the precision of floats is converted then. With `dtype`, outputs are converted as by
        `numpy.can_cast` with "same_kind".
    per_member : sequence, optional
        What each member returns after its arrays, in the same tuple: for each value an example, a
        number or an array of the value's shape and dtype. It becomes an array with one block a
        member, along a new first axis, of NumPy.
    **kwargs
        For `func`. Each member has its own copy, except of objects that cannot be copied. A keyword
        that `spmd` has too is given by `functools.partial`.

    Returns
    -------
    dask.array.Array, or tuple of them
        With the chunks of the arrays; then those of `per_member`.

    Raises
    ------
    InputError
        If `func` cannot be called, a number is too small, an example in `per_member` is none, or an
        argument for `func` has still to be computed, or is a keyword of `spmd` too. Also if `dtype`
        has another length than `outputs`.
    AxesError
        If there is no axis of a number in `cut`.
    ChunksError
        If chunk sizes are unknown, or differ between the arrays.
    UnsupportedArrayError
        If one of `arrays` is no Dask array of NumPy or CuPy blocks, or they are of both kinds.
    BlockMismatchError
        When it runs, if `func` returns something else.
    SectionError
        When it runs, if the members' calls differ, the members come to no end after
        `p2p.attempts` attempts, or the workers can never run all of them at the same time.

    Examples
    --------
    >>> import dask.array as da
    >>> def normalized(ctx, x):
    ...     return x / ctx.allreduce((x**2).sum()) ** 0.5
    >>> x = da.ones(16, chunks=4)
    >>> spmd(normalized, x).compute(scheduler="sync")[:3]
    array([0.25, 0.25, 0.25])
    """
    check_function(func, "a context and arrays", "spmd(func, x)")
    check_names(func, 1 + len(arrays), spmd, locals())
    check_shares(arrays)
    check_computed(*kwargs.values())
    chosen = chosen_members(arrays[0], members, cut)
    options = checked_options()
    register_if_possible()
    if not isinstance(per_member, (list, tuple)):
        raise InputError(
            f"per_member: expected a list with an example of each value, got {per_member!r}. Give "
            f"one as [example]."
        )
    values = [_checked_example(example) for example in per_member]
    if not values or outputs != 0:
        checked_count("outputs", outputs=outputs)
    made = section_arrays(
        "p2p-spmd",
        _Function(func, outputs + len(values), kwargs),
        arrays,
        chosen,
        _dtypes(dtype, outputs, arrays),
        options,
        values,
        converts=dtype is not None,
    )
    return made[0] if len(made) == 1 else made


def _dtypes(dtype: Any, outputs: int, arrays: Sequence[DaskArray]) -> list[Any]:
    """Return the dtype of each output."""
    if dtype is None:
        later = outputs - len(arrays)
        return [*(x.dtype for x in arrays), *[arrays[0].dtype] * later][:outputs]
    if not isinstance(dtype, (tuple, list)) or any(isinstance(each, tuple) for each in dtype):
        return [np.dtype(dtype)] * outputs  # a list of tuples is one dtype, with fields
    if len(dtype) != outputs:
        raise InputError(
            f"dtype: expected one for all outputs, or a tuple with one for each of {outputs}, got "
            f"{len(dtype)}: {dtype!r}. Give one dtype for each output."
        )
    return [np.dtype(each) for each in dtype]


def _checked_example(example: Any) -> ValueSpec:
    value = np.asarray(example)
    if is_dask_array(example) or value.dtype.kind in "OSU":
        raise InputError(
            f"per_member: expected numbers or arrays of NumPy, as examples of what a member "
            f"returns, got {type(example).__name__}."
        )
    return ValueSpec(value.shape, value.dtype)


@dataclass(frozen=True)
class _Function:
    """The user's function, with what it is given beside its arrays."""

    function: Callable[..., Any]
    outputs: int
    kwargs: Mapping[str, Any]

    def __call__(self, ctx: Context, shares: Shares) -> Any:
        arrays = map(shares.copy, range(len(shares)))
        returned = self.function(ctx, *arrays, **self.kwargs)
        made = (returned,) if self.outputs == 1 else returned
        ctx.check_returned(made if isinstance(made, tuple) else ())
        return made
