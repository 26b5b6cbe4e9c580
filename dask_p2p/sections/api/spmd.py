"""`spmd`: runs a function on all workers at the same time, with communication between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_p2p.backends.dlpack import checked_library, wrap_in_library
from dask_p2p.config import checked_options
from dask_p2p.errors import InputError
from dask_p2p.inputs import checked_count, checked_dtype
from dask_p2p.ops.arguments import check_function, check_names
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.sections.api.graph import (
    Whole,
    check_computed,
    check_decompositions,
    checked_inputs,
    chosen_ranks,
    most_ranks,
    section_arrays,
)
from dask_p2p.sections.api.outputs import Output, Outputs, checked_outputs, outputs_in_order
from dask_p2p.sections.api.rank_body import LocalBlocks
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.values import leaves
from dask_p2p.types import DaskArray, DTypeLike


def spmd(
    func: Callable[..., Any],
    /,
    *arrays: DaskArray | Whole,
    outputs: int | Output | Sequence[Output] | Mapping[str, Output] = 1,
    partition: Sequence[int] | None = None,
    ranks: int | None = None,
    dtype: DTypeLike | Sequence[DTypeLike] | None = None,
    per_rank: Sequence[Any] = (),
    as_library: str | None = None,
    **kwargs: Any,
) -> Any:
    """Run a function on all workers at the same time: ``func(ctx, *local_blocks, **kwargs)``.

    The function runs once on each *rank*. A rank has one contiguous local block of each array,
    which `func` may change. Ranks exchange data by the methods of `ctx`, a
    `dask_p2p.results.Context`. All ranks must call the same methods in the same order. If a
    worker is lost, all ranks run again.

    Parameters
    ----------
    func : callable
        Function of the context and the local blocks. Returns an array of a local block's shape. Its
        result must depend only on its arguments, and on values that the context returns.
    *arrays : dask.array.Array
        Arrays of NumPy or CuPy blocks. The first one determines the grid of ranks. Arrays of its
        shape have the same chunks; others of its number of axes are divided as
        `Context.grid_of` divides their shapes. Each rank receives all of ``dask_p2p.Whole(x)``, an
        array of any shape. With CuPy blocks, `func` gets and returns CuPy
        arrays. It runs with a CUDA stream of its own as the current stream, and need not
        synchronize. Without arrays, `ranks` and other outputs than local blocks are required.
    outputs : int, output, or list or dict of outputs, optional
        Number of arrays of a local block's shape that `func` returns, in a tuple unless it is one.
        0 if `func` returns only the values of `per_rank`. Or one of `LocalBlock`, `Array`, `Rows`,
        `PerRank`, `Same`, for an array of any shape. Or a list of several of these, for a function
        that returns a tuple; `spmd` returns a tuple then. A dict has several of these by name;
        `func` returns a dict of the same names then, and so does `spmd`.
    partition : sequence of int, optional
        Axes that may be divided between ranks. By default all.
    ranks : int, optional
        Largest number of ranks. The number of blocks is a limit as well; without arrays the number
        of ranks itself. By default one for each of the cluster's workers that have the
        resources of `dask.annotate`, or one for each of their threads if local blocks of NumPy have
        1 MiB or more. It is 1 without a cluster, and with an asynchronous client. Give ``ranks=1``
        in the function of another section.
    dtype : dtype or sequence of dtype, optional
        Data type of all outputs, or a tuple with one for each output. Outputs are converted to it
        as by `numpy.can_cast` with "same_kind". By default, output i has the dtype of array i, or
        of the first array if there is no such array; only the precision of floats is converted.
    per_rank : sequence, optional
        Examples of the values that `func` returns after its arrays, in the same tuple. An example
        is a number, or an array of the value's shape and dtype. Each value becomes an array of
        NumPy blocks, one for each rank, along a new first axis.
    as_library : {"torch", "jax"}, optional
        Library of the local blocks that `func` receives and of the arrays that it returns, as for
        `iterate`. Methods of the context receive and return NumPy or CuPy arrays.
    **kwargs
        Keyword arguments for `func`. Each rank has its own copy, except of objects that cannot be
        copied. Use `functools.partial` for a keyword that `spmd` has as well.

    Returns
    -------
    dask.array.Array, or tuple or dict of them
        The outputs, with the chunks of the arrays; then the values of `per_rank`. A dict if
        `outputs` is one.

    Raises
    ------
    InputError
        If `func` is not callable, a number is too small, or an example in `per_rank` is
        unsuitable. Also if `outputs` is no output, or has `dtype` or `per_rank` in addition. Also
        if an argument for `func` is a Dask collection, or has the name of a parameter
        of `spmd`, or if `dtype` has another length than `outputs`. Also if the library `as_library`
        is unknown, or cannot hold the arrays.
        Also if `partition` has an axis that the arrays do not have.
        Also if chunk sizes are unknown, or differ between arrays of one shape. Also if the numbers
        of axes differ.
    UnsupportedArrayError
        If one of `arrays` is not a Dask array of NumPy or CuPy blocks, or if both kinds are mixed.
    BlockMismatchError
        At run time, if `func` returns other arrays.
    ConfigError
        At run time, if a worker lacks the library `as_library`.
    SectionError
        At run time, if the ranks' calls differ, if `p2p.attempts` attempts have failed, or if the
        workers can never run all ranks at the same time.

    See Also
    --------
    iterate : Steps of a stencil, without messages of your own.
    stalled : The states of ranks that wait.

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
    func = wrap_in_library(func, checked_library(as_library))
    has_specs = isinstance(outputs, (Output, Mapping, list, tuple))
    if arrays or not has_specs:
        first_arrays: Any = arrays[:1]
        check_decompositions(first_arrays)
    check_computed(*kwargs.values())
    if arrays:
        first: Any = arrays[0]
        chosen = chosen_ranks(first, ranks, partition)
        inputs, specs = checked_inputs(arrays, chosen)
    elif ranks is None:
        raise InputError(
            "ranks: expected a number of ranks for a section without arrays, got None. Give one, "
            "such as the number of workers."
        )
    else:
        chosen, inputs, specs = RankGrid.in_line(most_ranks(ranks)), [], []
    options = checked_options()
    checked = _checked(outputs, inputs, dtype, per_rank)
    register_if_possible()
    results = section_arrays(
        "p2p-spmd",
        _Function(func, kwargs),
        inputs,
        specs,
        chosen,
        checked,
        options,
    )
    if checked.names is not None:
        return dict(zip(checked.names, results, strict=True))
    return results[0] if len(results) == 1 and not checked.is_sequence else results


def _checked(outputs: Any, arrays: Sequence[DaskArray], dtype: Any, per_rank: Any) -> Outputs:
    """Return the outputs with their dtypes, from their number or from their specs."""
    if isinstance(outputs, int):
        if not isinstance(per_rank, (list, tuple)):
            raise InputError(
                f"per_rank: expected a list with an example of each value, got {per_rank!r}. Give "
                f"one as [example]."
            )
        if not per_rank or outputs != 0:
            checked_count("outputs", outputs=outputs)
        return outputs_in_order(_dtypes(dtype, outputs, arrays), dtype is not None, per_rank)
    checked = checked_outputs(outputs, [x.dtype for x in arrays])
    if dtype is not None or per_rank != ():
        raise InputError(
            "expected outputs= without dtype= and per_rank=, got both. Give them in the outputs, "
            "LocalBlock(dtype) and PerRank(example)."
        )
    return checked


def _dtypes(dtype: Any, outputs: int, arrays: Sequence[DaskArray]) -> list[Any]:
    if dtype is None:
        later = outputs - len(arrays)
        return [*(x.dtype for x in arrays), *[arrays[0].dtype] * later][:outputs]
    if not isinstance(dtype, (tuple, list)) or any(isinstance(part, tuple) for part in dtype):
        # A list of tuples is one dtype, with fields.
        return [checked_dtype("dtype", dtype)] * outputs
    if len(dtype) != outputs:
        raise InputError(
            f"dtype: expected one for all outputs, or a tuple with one for each of {outputs}, got "
            f"{len(dtype)}: {dtype!r}. Give one dtype for each output."
        )
    return [checked_dtype("dtype", output_dtype) for output_dtype in dtype]


@dataclass(frozen=True)
class _Function:
    """The user's function, with its keyword arguments."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]

    def __call__(self, ctx: Context, local_blocks: LocalBlocks) -> Any:
        arrays = map(local_blocks.copy, range(len(local_blocks)))
        try:
            returned = self.function(ctx, *arrays, **self.kwargs)
            ctx.flush_stores()  # the function may have left its loop of steps
        finally:
            ctx.close_stores()
        ctx.halo_copies.check_returned(leaves(returned))
        return returned
