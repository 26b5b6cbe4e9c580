"""`iterate`: stencils that are applied repeatedly, on all workers at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from dask_p2p.backends.dlpack import checked_library
from dask_p2p.config import checked_options
from dask_p2p.inputs import checked_count, checked_flag
from dask_p2p.plugins.registration import register_if_possible
from dask_p2p.sections.api.graph import Whole, chosen_ranks, input_spec, section_arrays
from dask_p2p.sections.exchange.regions import checked_order
from dask_p2p.sections.gang.checkpoints import checked_period
from dask_p2p.sections.iterate.arguments import (
    check_functions,
    check_streaming,
    checked_arguments,
    checked_capture,
    checked_time,
)
from dask_p2p.sections.iterate.fields import Field
from dask_p2p.sections.iterate.output.stores import Checkpoint, Save
from dask_p2p.sections.iterate.rank_loop import RunIteration
from dask_p2p.types import DaskArray, DTypeLike


def iterate(
    func: Callable[..., Any] | Sequence[Any],
    fields: DaskArray | Sequence[DaskArray] | Mapping[str, Any],
    /,
    depth: Any,
    steps: int,
    *,
    boundary: Any = "periodic",
    constants: Any = (),
    corners: bool = True,
    overlap: bool | Literal["auto"] = "auto",
    exchange: str = "auto",
    record: Mapping[str, Any] = MappingProxyType({}),
    save: Save | Sequence[Save] = (),
    checkpoint: Checkpoint | None = None,
    until: Callable[..., bool] | None = None,
    max_time: str | None = None,
    check_every: int = 1,
    checkpoint_every: int | str | None = "30 s",
    ranks: int | None = None,
    dtype: DTypeLike | None = None,
    capture: bool | str = "auto",
    as_library: str | None = None,
    on_gpu: str | None = None,
    steps_per_visit: int | None = None,
    slab_rows: int | None = None,
    **kwargs: Any,
) -> Any:
    """Apply a function repeatedly to blocks with a halo, and exchange halos between workers.

    >>> import dask.array as da
    >>> def smooth(u, out):
    ...     out[:] = (u[:-2] + u[2:]) / 2
    >>> x = da.arange(6, chunks=3, dtype=float)
    >>> y = iterate(smooth, x, depth=1, steps=2, boundary="nearest")
    >>> y.compute(scheduler="sync")
    array([0.75, 1.25, 2.  , 3.  , 3.75, 4.25])

    All steps are one layer of the graph. Each worker runs a rank, which has one contiguous local
    block of the array. A step costs the time of the function and of the halo exchange. For a
    mapping of fields the result is a dict of arrays; compute them by ``dask.compute(result)``.

    Parameters
    ----------
    func : callable or list
        With one field, ``func(u, *constants, out=out)`` fills `out`, a local block without a halo.
        Without a parameter `out` it returns the new local block, with or without a halo, which
        allocates memory in each step. With a mapping of fields, the parameters are names of fields,
        constants and keywords, in any order. The function returns the blocks that it changes,
        ``{"u": ..., "v": ...}``, or fills ``out.u`` and ``out.v``. A list has the *phases* of a
        step. Halos of changed fields are updated before the next phase. A pair
        ``(function, ("u",))`` names the fields that a function with a parameter `out` fills; by
        default all. A parameter `at` gets the position: ``at.step``, ``at.box``, ``at.shape``,
        ``at.index``, ``at.rank`` and ``at.last``, the newest records by name. Fields have a halo of
        width `depth`. Fields and constants are read-only: write into `out`, or into a copy. The
        result must depend on the arguments alone, and at each point on its neighbours alone. The
        first two steps check the function by further calls. Results of some functions for halves of
        a local block differ from those for the whole block, as of ``u - u.mean()``. They depend on
        the number of ranks, so a warning names the function.
    fields : dask.array.Array, mapping of str or sequence
        The initial field, or a mapping of coupled fields by name. A value of the mapping is a Dask
        array, a list of time levels, the newest first, a number, or a `dask_p2p.Field` with
        options. The function receives a tuple of time levels, and its result becomes the newest. A
        number, such as the time, must become the same on all ranks; a function with a parameter
        `out` returns the numbers that it changes, ``{"t": t + dt}``. A sequence of
        arrays in place of the mapping has the time levels of one field, which are separate
        arguments of the function. All arrays have the same shape and chunks, in NumPy or CuPy
        blocks. In a mapping a field may be longer by one along some axes than the first one, such
        as the faces of cells: the last rank has the additional element, and `overlap` has no
        effect. With CuPy blocks `func` receives CuPy arrays, and the rank's own stream is the
        current one. It need not wait for work on that stream.
    depth : int, tuple, dict or list
        Width of the halo, as for `dask_p2p.map_overlap`; in a list one for each time level, and in
        a mapping by names of fields one for each field, where "*" stands for all others. A halo may
        be wider than a local block.
    steps : int
        Largest number of applications of `func`. With 0 the fields are returned unchanged.
    boundary : str, scalar, tuple or dict, optional
        Values beyond the ends of the array, as for `dask_p2p.map_overlap`: by default "periodic".
        With "none" local blocks at the ends have no halo there. A pair in a dict by axis,
        ``{0: ("nearest", 0.0)}``, has the values before and after the array. "odd" is the mirror
        image with the opposite sign. A function ``f(rim, inside, at)`` fills `rim`, the part of the
        halo beyond an end, in place. Its mirror image `inside` has the same shape, and ``at.index``
        the indices of `rim`, from -1 downwards and from the length upwards. It must compute each
        element by itself; a warning names others. With functions `overlap` has no effect. A mapping
        by names of fields has one boundary for each field, where "*" stands for all others.
    constants : sequence or mapping, optional
        Further arguments, which `func` reads in each step: in a mapping if the fields are in one. A
        Dask array must have the shape of the fields. Each rank receives its local block, without a
        halo. Other values are passed unchanged. In a mapping, NumPy and CuPy arrays are divided as
        well, by the rules of broadcasting: an array of the last axes has one block for all indices
        of the others. ``dask_p2p.Field(c, depth=1)`` is a constant with a halo, and
        ``dask_p2p.Whole(a)`` is not divided: each rank receives the whole array, lazy or not.
        ``dask_p2p.Points(xy)`` has sources or receivers between the elements. All arrays are of the
        fields' kind, NumPy or CuPy.
    corners : bool, optional
        If True, the default, the halo includes corners: right for all stencils. A star-shaped
        stencil does not read corners. With False they are not exchanged where several axes are
        divided between ranks, and hold NaN, or zero if the dtype has no NaN. The first step then
        refuses a function whose results depend on them.
    overlap : bool or "auto", optional
        If True, `func` computes the interior of a local block while the halo is in flight, and then
        the boundary, in two parts for each divided axis. It must compute parts as it computes the
        whole, apart from rounding errors: the second step compares both. "auto", the default,
        overlaps if halos come from another host and local blocks have at least 2**18 elements, or
        256 MiB for CuPy blocks. Captured steps overlap from 32 MiB on. Then the code of `func` must
        also show that it depends on its arguments alone, as for `capture`, and its values for parts
        must have the same bits.
    exchange : {"auto", "diagonal", "left-right", "pairwise"}, optional
        Order of messages in halo exchanges: see `dask_p2p.results.Context.redistribute`.
    record : mapping, optional
        Functions of fields, constants and `at` by name, or `dask_p2p.Record` objects. Each returns
        the number of one local block after a step. The numbers of all ranks are combined, and the
        result has the series of each name. Only for a mapping of fields.
    save : Save or sequence of Save, optional
        Zarr groups for frames of the fields. Only for a mapping of fields.
    checkpoint : Checkpoint, optional
        Folder of checkpoints in files. A later run resumes from the newest one. Only for a mapping
        of fields.
    until : callable, optional
        ``until(last)`` returns whether to stop, from a dict of the newest records. Without names of
        fields it is ``until(*numbers)``: `func` returns the numbers, in a tuple after the new local
        block if it returns one, and they are summed over all ranks.
    max_time : str, optional
        Time like "3 hours" after which the run ends, with a checkpoint in files if it has any. The
        result then has "steps", the number of steps done. After the loss of a worker the time
        starts again. Only for a mapping of fields.
    check_every : int, optional
        Number of steps between calls of `until`, by default 1.
    checkpoint_every : int, str or None, optional
        Number of steps, or time, between checkpoints. For a checkpoint each rank keeps a copy of
        its fields on its own worker and on another one. After the loss of a worker all ranks resume
        from the last checkpoint; without one, from the start.
    ranks : int, optional
        Largest number of ranks; there are never more than blocks of the array. By default one for
        each worker of the cluster that has the resources of `dask.annotate`, or one for each of
        their threads if local blocks of NumPy have 1 MiB or more. It is 1 without a cluster, or
        with an asynchronous client. Give ``ranks=1`` in the function of another section.
    dtype : dtype, optional
        Dtype of the fields and the result, by default that of the first field, or of each field of
        a mapping. Give it if the fields are integers and the function makes fractions:
        ``dtype=float``.
    capture : bool or "auto", optional
        If True, steps are captured as a CUDA graph and replayed, so that a step costs the host next
        to nothing. This helps with small local blocks, where the host takes most of the time.
        `func` is called in the first steps only. It must enqueue all its work on the current
        stream, read no host memory, and wait for nothing. Its results and the graph's are compared
        once, bit by bit. All ranks must be on one host, and read each other's memory by CUDA IPC.
        Otherwise, and for NumPy blocks, steps are not captured. "auto", the default, captures at
        least 500 steps of less than 512 MiB of fields a rank, if the code of `func` shows that it
        depends on its arguments alone. Such a function calls NumPy, CuPy and functions like itself,
        and its global values are numbers and kernels. Ranks that share a GPU, and steps that cannot
        be captured, are left as they are.
    as_library : {"torch", "jax"}, optional
        Library of the arrays that `func`, `record` and computed fields receive and return, in
        place of NumPy and CuPy arrays. They use the same memory. On a GPU work of PyTorch is
        enqueued on the rank's stream, and JAX's streams wait for it. JAX copies host arrays whose
        address is no multiple of 64. Functions of `boundary` receive NumPy or CuPy arrays.
    on_gpu : {None, "stream"}, optional
        With "stream", fields of NumPy blocks stay in host memory, and may be larger than a GPU. A
        rank copies its local block to the GPU slab by slab along the first axis, makes several
        steps on each slab, a *visit*, and copies it back; all three are concurrent. `func` receives
        CuPy arrays of parts of a block, so it must compute each element from its neighbours.
        Without a GPU it receives NumPy arrays of a size for caches. A visit ends at steps with a
        record, frame or checkpoint. There is one function, of arrays without numbers and `at`, and
        constants with one value for each element are `dask_p2p.Field`.
    steps_per_visit : int, optional
        Number of steps of a visit: halos are exchanged once for all of them, and are as many times
        as wide. By default the fastest number up to 64, by the times of a first visit.
    slab_rows : int, optional
        Number of rows of a slab. By default the fastest one.
    **kwargs
        Keywords for `func`, passed unchanged. Use `functools.partial` for a keyword that `iterate`
        has too.

    Returns
    -------
    dask.array.Array, dict or tuple
        One array for each field, with the chunks of the fields: a dict if the fields are in a
        mapping, with a list for a list of time levels; a tuple for a sequence. A number is an
        array without axes. With `record` the dict also has an array for each series, and "steps",
        the number of steps done.

    Raises
    ------
    InputError
        If `func` cannot be called, a number is too small, or `depth` or `boundary` is invalid. Also
        if a parameter of `func` is no known name, or a constant or a keyword is lazy; only
        constants may be Dask arrays. When it runs, if `func` writes into its fields or constants,
        or reads corners with ``corners=False``. Also if `overlap` is True, and `func` computes
        parts of a block otherwise than the whole, as with a counter. Also if `capture` is True, and
        `func` cannot be captured or then gives other values. Also if the library `as_library` is
        unknown, or cannot hold the arrays.
        Also if chunk sizes are unknown, or differ between fields.
    UnsupportedArrayError
        If a field is no Dask array of NumPy or CuPy blocks, or has Python objects; or if arrays
        are of both kinds.
    ConfigError
        When it runs, if a worker lacks the library `as_library`.
    FileError
        When it runs, if a store cannot be written, or is not seen by all workers.
    BlockMismatchError
        When it runs, if `func` returns other values than its blocks and the numbers for `until`.
        Also if it leaves elements of `out` unset, or makes numbers that the fields' dtype cannot
        hold.
    SectionError
        When it runs, if the ranks do not finish within `p2p.attempts` attempts, or if the workers
        can never run all of them at the same time.

    See Also
    --------
    spmd : Any function of the ranks, with messages.
    map_overlap : One step, as tasks of Dask.
    progress : The steps that are done.

    Examples
    --------
    Coupled fields:

    >>> import dask.array as da
    >>> x = da.arange(6, chunks=3, dtype=float)
    >>> def turn(u, v):
    ...     return {"u": u + 0.5 * v, "v": v - 0.5 * u}
    >>> made = iterate(turn, {"u": x, "v": x * 0}, depth=0, steps=2)
    >>> made["v"].compute(scheduler="sync")
    array([ 0., -1., -2., -3., -4., -5.])
    """
    check_functions(func, fields, constants, iterate, locals())
    field = Field(fields, depth, boundary, dtype, checked_flag("corners", corners))
    stores = save, checkpoint
    library = checked_library(as_library)
    arguments, inputs = checked_arguments(
        func, field, constants, kwargs, until, record, stores, library
    )
    first = inputs[0]
    if not isinstance(overlap, str) or overlap != "auto":
        overlap = checked_flag("overlap", overlap, "True, False or 'auto'")
    capture = checked_capture(capture, library, arguments)
    options = capture, overlap, library
    check_streaming(on_gpu, steps_per_visit, slab_rows, arguments, first, options)
    if on_gpu is not None:
        capture = False
    iteration = RunIteration(
        **vars(arguments),
        shape=first.shape,
        steps=checked_count("steps", 0, steps=steps),
        overlap=overlap,
        exchange=checked_order(exchange),
        until=until,
        check_every=checked_count("steps", check_every=check_every),
        period=checked_period(checkpoint_every),
        max_time=checked_time(max_time, arguments),
        capture=capture,
        kwargs=kwargs,
        is_streamed=on_gpu is not None,
        steps_per_visit=steps_per_visit,
        slab_rows=slab_rows,
    )
    options_of_ranks = checked_options()
    register_if_possible()
    chosen = chosen_ranks(first, ranks, None)
    arrays = section_arrays(
        "p2p-iterate",
        iteration,
        [x.value if isinstance(x, Whole) else x for x in inputs],
        [input_spec(x, first, chosen) for x in inputs],
        chosen,
        iteration.outputs,
        options_of_ranks,
    )
    return iteration.arrange(arrays)
