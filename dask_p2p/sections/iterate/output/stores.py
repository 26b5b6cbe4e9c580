"""The arguments `save` and `checkpoint` of `iterate` and `Context.steps`, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from dask_p2p.errors import InputError, needs
from dask_p2p.geometry import Box, Chunks, block_bounds
from dask_p2p.inputs import checked_count, checked_flag
from dask_p2p.ops.arguments import check_function
from dask_p2p.sections.context.state import DIVIDED, NUMBER
from dask_p2p.sections.gang.checkpoints import checked_period
from dask_p2p.sections.iterate.fields import check_name
from dask_p2p.sections.iterate.functions import OUT, Bind, BoundFunction
from dask_p2p.sections.iterate.output.groups import (
    Coordinate,
    absolute,
    checked_coords,
    checked_dims,
    store_chunks,
)


@dataclass(frozen=True)
class Save:
    """Frames of fields, which `iterate` or `Context.steps` writes to a Zarr group.

    The group has an array (frame, ...) for each field, for all frames of the run. When the run
    ends, the arrays end with the last frame. Their coordinates are `frame` and `step`, and numbers
    `t` and `time` of the program. Its attribute `frames` is the number of frames that all ranks
    have written, and `steps` the step of the last one. Each chunk has a checksum, which readers
    compare; a missing one is NaN, or 0 for integers. A thread of each rank writes a copy of its
    local blocks while steps go on. The next frame waits for the end of that write. A run that
    begins to write the same group ends an earlier one that is under way.

    Parameters
    ----------
    path : str or Path
        Folder of the group, which all workers can write: a path, or a URL that fsspec opens.
    every : int
        Number of steps between frames.
    fields : sequence of str, optional
        Names of the fields, by default all. The newest level of a field is saved.
    region : slice or tuple of slice, optional
        Part of the arrays that is saved, such as ``numpy.s_[::4, :100]``. By default all.
    compute : mapping, optional
        Functions of further fields by name, ``{"speed": f}``. The parameters of a function are
        names of fields, constants and keywords, and `at`, as for the function of a step. Fields
        have their halos. It returns a local block of the first field's shape, with or without
        halo. It is also called once before the first step, for the dtype. In the first frames it is
        called for halves of a local block, too. A warning names functions whose values depend on
        the number of ranks.
    dims : sequence of str, optional
        Names of the axes of the fields, as `xarray.open_zarr` reads them. By default "dim_0",
        "dim_1" and so on. The axis of frames is "frame".
    coords : mapping, optional
        Coordinates: one-dimensional arrays of numbers by the name of an axis.

    See Also
    --------
    Record : Series of numbers.
    Checkpoint : Files to resume from.

    Notes
    -----
    `iterate` and `Context.steps` check the arguments: `InputError` for a wrong one,
    `ConfigError` without Zarr, `FileError` for a folder that a worker cannot write.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> import dask.array as da
    >>> import zarr
    >>> from dask_p2p import Save, iterate
    >>> halve = lambda u: {"u": u / 2}
    >>> frames = Save(mkdtemp(), every=2)
    >>> fields = {"u": da.ones(3)}
    >>> y = iterate(halve, fields, depth=0, steps=4, save=frames)
    >>> y["u"].compute(scheduler="sync")
    array([0.0625, 0.0625, 0.0625])
    >>> zarr.open_group(frames.path)["u"][:]
    array([[0.25  , 0.25  , 0.25  ],
           [0.0625, 0.0625, 0.0625]])
    """

    path: str | Path
    every: int
    fields: Sequence[str] | None = None
    region: slice | tuple[slice, ...] = ()
    compute: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    dims: Sequence[str] | None = None
    coords: Mapping[str, Any] = field(default_factory=dict)

    def of_state(self, ctx: Any, state: Any, steps: int | None) -> Any:
        """Return the frames of a state, for `Context.steps`.

        Raises `InputError` for other arguments, and `MissingPackageError` without Zarr.
        """
        from dask_p2p.sections.iterate.output.files import StateValues
        from dask_p2p.sections.iterate.output.frames import Frames

        _check_for_state(self.path)
        if steps is None or self.compute:
            raise InputError(
                "save: expected a number of steps, and a Save without computed fields, got "
                f"{'ctx.steps(None)' if steps is None else 'compute='}. Give the number of steps, "
                "and keep computed values in the state."
            )
        values = StateValues(ctx, state)
        kinds = {name: value.kind for name, value in values.current().items()}
        names = [name for kind in (DIVIDED, NUMBER) for name in kinds if kinds[name] == kind]
        if DIVIDED not in kinds.values():
            raise InputError(
                "save: expected a state with an array of the local block's shape, got none. Give "
                "ctx.state the array."
            )
        spec = checked_frames(self, names, None, values.grid.chunks)
        return Frames(spec, ctx, values.current, steps)


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints in files, which `iterate` or `Context.steps` writes, and resumes from.

    A run begins at the newest complete checkpoint, with any number of ranks and any chunks. Then it
    does not use the initial values that it gets. A warning names initial values, constants,
    keywords, boundaries, depths and functions that differ from those of the first run. A
    fingerprint shows damaged checkpoints: then a warning names the newest one, and the run begins
    at an older one. Checkpoints that another run writes to the same folder at the same time end the
    run that began first.

    Parameters
    ----------
    path : str or Path
        Folder of the checkpoints, which all workers can write: a path, or a URL that fsspec opens.
    every : int or str, optional
        Number of steps, or time, between checkpoints; by default "10 minutes".
    keep : int, optional
        Number of complete checkpoints that are kept, by default 2. A run removes others when it
        begins, and after each new one.
    resume : bool, optional
        If False, a folder that has checkpoints is refused.

    See Also
    --------
    Save : Frames for evaluation. Its errors are those of checkpoints, too.

    Examples
    --------
    The second run makes two steps:

    >>> from tempfile import mkdtemp
    >>> import dask.array as da
    >>> from dask_p2p import Checkpoint, iterate
    >>> halve = lambda u: {"u": u / 2}
    >>> def run(steps):
    ...     u = da.ones(3)
    ...     y = iterate(halve, {"u": u}, 0, steps, checkpoint=files)
    ...     return y["u"].compute(scheduler="sync")
    >>> files = Checkpoint(mkdtemp(), every=2)
    >>> run(2), run(4)
    (array([0.25, 0.25, 0.25]), array([0.0625, 0.0625, 0.0625]))
    """

    path: str | Path
    every: int | str = "10 minutes"
    keep: int = 2
    resume: bool = True

    def of_state(self, ctx: Any, state: Any, steps: int | None) -> Any:
        """Return the files of a state, for `Context.steps`.

        Raises `InputError` for other arguments, and `MissingPackageError` without Zarr.
        """
        from dask_p2p.sections.iterate.output.checkpoints import CheckpointFiles
        from dask_p2p.sections.iterate.output.files import StateValues

        _check_for_state(self.path)
        return CheckpointFiles(_checked_checkpoint(self), ctx, StateValues(ctx, state))


def _check_for_state(path: Any) -> None:
    """Refuse a path that workers would look up in current folders of their own."""
    with needs("zarr", "zarr"):
        import zarr  # noqa: F401
    if "://" not in str(path) and not Path(path).is_absolute():
        raise InputError(
            f"expected an absolute path, as workers have other current folders, got "
            f"{str(path)!r}. Give str(pathlib.Path(...).absolute())."
        )


def checked_stores(
    save: Any,
    checkpoint: Any,
    names: Sequence[str],  # of the fields
    bind: Bind,
    chunks: Chunks,  # of the first field
) -> tuple[tuple[FramesSpec, ...], Checkpoint | None]:
    """Return the frames and the checkpoints of a run, with absolute paths.

    Raises `InputError` for anything else than stores of the fields, and `MissingPackageError`
    without Zarr, or without a package for a URL.
    """
    saves = list(save) if isinstance(save, Iterable) else [save]
    if not saves and checkpoint is None:
        return (), None
    with needs("zarr", "zarr"):
        import zarr  # noqa: F401
    for store in saves:
        if not isinstance(store, Save):
            raise InputError(
                f"save: expected Save objects, got {type(store).__name__}. Give "
                f"[dask_p2p.Save('frames.zarr', every=100)]."
            )
    frames = tuple(checked_frames(save, names, bind, chunks) for save in saves)
    if checkpoint is not None:
        checkpoint = _checked_checkpoint(checkpoint)
        store_chunks(chunks)  # refuses chunks that no store can have
    paths = [store.path for store in (*frames, *([checkpoint] if checkpoint else ()))]
    if len({*paths}) < len(paths):
        raise InputError("expected another path for each store, got one twice. Rename it.")
    return frames, checkpoint


def _checked_checkpoint(checkpoint: Any) -> Checkpoint:
    if not isinstance(checkpoint, Checkpoint):
        raise InputError(
            f"checkpoint: expected a Checkpoint object, got {type(checkpoint).__name__}. Give "
            f"dask_p2p.Checkpoint('states')."
        )
    return Checkpoint(
        absolute(checkpoint.path),
        checked_period(checkpoint.every) or "10 minutes",
        checked_count("checkpoints", keep=checkpoint.keep),
        checked_flag("resume", checkpoint.resume),
    )


@dataclass(frozen=True)
class FramesSpec:
    """The checked arguments of a `Save`."""

    path: str
    every: int
    fields: tuple[str, ...]
    computed: Mapping[str, BoundFunction]  # by name of the field
    region: tuple[slice, ...]  # empty: all
    chunks: tuple[int, ...]  # of the store's arrays, without the axis of frames
    dims: tuple[str, ...]  # names of the axes
    coords: Mapping[str, Coordinate]  # by name of an axis, or "frame"

    def size_bytes(self, box: Box, shape: Sequence[int], item_bytes: Mapping[str, int]) -> int:
        """Return the size of a frame's part in a box of the first field, which is named first."""
        along = zip(self.slices(len(shape)), shape, box, strict=True)
        rows = [part_of_slice(selection, length, *bounds)[0] for selection, length, bounds in along]
        first = next(iter(item_bytes.values()))
        sizes = [item_bytes.get(name, 0) for name in self.fields] + [first] * len(self.computed)
        count: int = prod(selected.stop - selected.start for selected in rows)
        return count * sum(sizes)

    def slices(self, ndim: int) -> tuple[slice, ...]:
        return self.region or (slice(None),) * ndim


def checked_frames(
    save: Save,
    names: Sequence[str],
    bind: Bind | None,  # None: there are no functions
    chunks: Chunks,
) -> FramesSpec:
    """Return the checked arguments of a `Save`; raise `InputError` for invalid ones."""
    is_list = isinstance(save.fields, Collection) and not isinstance(save.fields, (str, bytes))
    if save.fields is not None and not is_list:
        raise InputError(
            f"save: expected a list of names of fields, {[*names]}, got "
            f"fields={save.fields!r:.80}. Give fields=[{names[0]!r}]."
        )
    fields = tuple(names if save.fields is None else save.fields)
    computed = {} if bind is None else _checked_computed(save.compute, names, bind)
    if not (fields or computed) or not {*fields} <= {*names}:
        raise InputError(
            f"save: expected names of fields, {[*names]}, got {list(fields)}. Rename them."
        )
    every = checked_count("steps between frames", every=save.every)
    region = _checked_region(save.region, [sum(along) for along in chunks])
    sizes = _region_chunks(chunks, region) if region else store_chunks(chunks)
    dims = checked_dims(save.dims, len(chunks))
    along_axes = dict(zip(dims, [sum(along) for along in chunks], strict=True))
    coords = checked_coords(save.coords, along_axes, {*fields, *computed})
    return FramesSpec(absolute(save.path), every, fields, computed, region, sizes, dims, coords)


def _checked_computed(
    functions: Any, names: Collection[str], bind: Bind
) -> dict[str, BoundFunction]:
    if not isinstance(functions, Mapping):
        raise InputError(
            f"compute: expected a mapping of functions by name, got {type(functions).__name__}. "
            f"Give {{'speed': lambda u, v: (u**2 + v**2) ** 0.5}}."
        )
    computed = {}
    for name, function in functions.items():
        check_name(name, "a computed field")
        check_function(function, "fields", "compute={'square': lambda u: u**2}")
        computed[name] = bind(function)
        if name in names or computed[name].binding.fills_out:
            raise InputError(
                f"compute: expected a name that no field has, and a function that returns a local "
                f"block, without a parameter {OUT}, got {name!r}. Change it."
            )
    return computed


# --- regions and chunks


def _checked_region(region: Any, shape: Sequence[int]) -> tuple[slice, ...]:
    """Return a slice for each axis, or none for the whole array."""
    slices = (region,) if isinstance(region, slice) else region
    is_valid = isinstance(slices, tuple) and len(slices) <= len(shape)
    if not is_valid or not all(map(_is_slice, slices)):
        raise InputError(
            f"region: expected a tuple of slices with positive steps, at most {len(shape)}, got "
            f"{region!r}. Give numpy.s_[::4, :100], and a range for one index, 5:6."
        )
    if not all(range(n)[selection] for n, selection in zip(shape, slices, strict=False)):
        raise InputError(
            f"region: expected slices that select elements of an array of shape {tuple(shape)}, "
            f"got {region!r}. Give other ones."
        )
    return (*slices, *(slice(None) for _ in shape[len(slices) :])) if slices else ()


def _is_slice(value: Any) -> bool:
    try:
        return isinstance(value, slice) and value.indices(0)[2] > 0
    except (TypeError, ValueError):  # of ends that are no integers, of a step of 0
        return False


def part_of_slice(selection: slice, length: int, start: int, stop: int) -> tuple[slice, slice]:
    """Return the selected elements of a range: their positions among all, and in the range.

    >>> part_of_slice(slice(1, 9, 3), 10, 4, 10)  # of 1, 4, 7
    (slice(1, 3, None), slice(0, 6, 3))
    """
    rows = range(length)[selection]
    first, last = (min(max(0, -(-(n - rows.start) // rows.step)), len(rows)) for n in (start, stop))
    low = rows.start + first * rows.step - start
    return slice(first, last), slice(low, low + (last - first) * rows.step, rows.step)


def _region_chunks(chunks: Chunks, region: Sequence[slice]) -> tuple[int, ...]:
    """Return the chunks of a store for a region: such that ranks share none, if possible."""
    parts = []
    for selection, along in zip(region, chunks, strict=True):
        bounds = block_bounds(along)
        rows = [part_of_slice(selection, bounds[-1], *pair)[0] for pair in pairwise(bounds)]
        parts.append(
            tuple(
                selected.stop - selected.start
                for selected in rows
                if selected.stop > selected.start
            )
        )
    try:
        return store_chunks(tuple(parts))
    except InputError:
        return tuple(map(max, parts))  # ranks write in turn
