"""The frames of one `Save`: each rank writes its part of the saved arrays, in a thread."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.geometry import Box, box_shape
from dask_p2p.sections.api.outputs import shape_of
from dask_p2p.sections.checks import Comparison, PositionWatch, watched
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.state import State
from dask_p2p.sections.iterate.fields import Scalars
from dask_p2p.sections.iterate.functions import Binding
from dask_p2p.sections.iterate.local_fields import LocalField, LocalFields
from dask_p2p.sections.iterate.output.files import DIVIDED, NUMBER, StateValues
from dask_p2p.sections.iterate.output.groups import (
    FRAME,
    TIMES,
    Coordinate,
    Folder,
    another_run,
    attributes_of,
    create_arrays,
    created,
    difference,
    explained,
    named_axes,
    opened,
    plain,
    remove_frames,
    resize,
    seen_by_all,
    stored,
    together,
)
from dask_p2p.sections.iterate.output.specs import (
    ComputedField,
    FramesSpec,
    checked_frames,
    part_of_slice,
)
from dask_p2p.sections.iterate.step import Reader
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.output.specs import SaveArguments


#: Returns a function's arguments for a box of the local block, after the last step; None: unread.
Values = Callable[[Binding, Box], Mapping[str, Any]] | None
Slices = tuple[slice, ...]


class Frames:
    """The frames of one rank."""

    def __init__(
        self, spec: FramesSpec, ctx: Context, local: LocalFields, scalars: Scalars, steps: int
    ) -> None:
        self.spec, self._ctx, self._scalars = spec, ctx, scalars
        self._folder, self._count = Folder(spec.path), steps // spec.every
        self._first = next(iter(local.fields.values()))  # computed fields have its shape
        times = [name for name in TIMES if name in scalars.values and name not in spec.fields]
        self._names = (*spec.fields, *times)  # of fields and numbers
        self._fields = {name: local.fields[name] for name in spec.fields if name in local.fields}
        self._fields |= {computed.name: self._first for computed in spec.computed}
        #: By computed field.
        self._readers = {
            computed.name: Reader(ctx.device, computed.function) for computed in spec.computed
        }
        self._comparisons = {
            computed.name: self._comparison(computed, local) for computed in spec.computed
        }
        self._arrays: dict[str, Any] = {}  # of the store
        self._parts: dict[str, tuple[Slices, Slices]] = {}  # in the whole array; in the local block
        self._copies: dict[str, Array] = {}  # of the frame to write
        self._number = 0  # of that frame
        self._run = secrets.token_hex(8)  # in the store: the newest run that writes it
        self.in_turn = False  # whether ranks share chunks, and write in turn

    # --- before the first step

    def open(self, first: int, values: Values) -> None:
        """Create the group, or make it ready for frames after a first step."""
        shapes = dict(self._shapes(values))
        together(self._ctx, self._folder, partial(self._open, shapes, first))
        self._group = seen_by_all(self._ctx, self._folder)
        for name, (_, dtype) in shapes.items():
            self._arrays[name] = stored(self._group, name)
            if name in self._fields:
                self._parts[name] = parts = self._part(self._fields[name])
                shape = tuple(rows.stop - rows.start for rows in parts[0])
                self._copies[name] = np.empty(shape, dtype)
        self.in_turn = bool(self._ctx.allreduce(int(self._shares_chunks()), "max"))

    def _shapes(self, values: Values) -> Iterator[tuple[str, tuple[tuple[int, ...], Any]]]:
        """Yield the name, shape and dtype of each array."""
        numbers = self._scalars.values
        for name in self._names:
            if name in numbers:
                yield name, ((), numbers[name].dtype)
            else:
                field = self._fields[name]
                yield name, (self._shape(field), field.spec.dtype)
        for computed in self.spec.computed:
            dtype = self._computed(computed, values).dtype
            yield computed.name, (self._shape(self._first), dtype)

    def _shape(self, field: LocalField) -> tuple[int, ...]:
        slices = self.spec.slices(len(field.shape))
        return tuple(
            len(range(n)[selection]) for n, selection in zip(field.shape, slices, strict=True)
        )

    def _part(self, field: LocalField) -> tuple[Slices, Slices]:
        along = zip(self.spec.slices(len(field.shape)), field.shape, field.box, strict=True)
        pairs = [part_of_slice(selection, length, *box) for selection, length, box in along]
        return tuple(global_rows for global_rows, _ in pairs), tuple(local for _, local in pairs)

    def _open(self, shapes: Mapping[str, Any], first: int) -> None:
        """Create the group and its arrays, or compare them. On rank 0."""
        every, folder = self.spec.every, self._folder
        program = {"format": "dask_p2p frames 1", "every": every, "arrays": plain(shapes)}
        if self.spec.region:
            rows = zip(self._first.shape, self.spec.region, strict=True)
            program["region"] = [list(selection.indices(length)) for length, selection in rows]
        # A killed process leaves partial files.
        names = [name for name in folder.names() if not name.endswith(".partial")]
        group = opened(folder) if names else None
        if group is None or not (group.attrs or [*group.array_keys()]):  # of a run that ended here
            group = created(folder, shapes, {"program": program, "frames": 0, "steps": 0})
        elif group.attrs.get("program") != program:
            raise InputError(
                f"expected a new folder, or frames of the same fields and steps, at {folder}, got "
                f"{difference(group.attrs.get('program'), program)}. Give another path, or remove "
                f"the folder."
            )
        count = min(first // every, int(group.attrs["frames"]))
        if count < first // every:
            raise InputError(
                f"expected {first // every} frames at {folder}, as the run resumes at step "
                f"{first}, got {count}. Give the folder of the earlier run, or another checkpoint."
            )
        group.attrs.update({"frames": count, "steps": count * every, "run": self._run})
        missing = {
            name: shape_and_dtype for name, shape_and_dtype in shapes.items() if name not in group
        }
        dims = {name: (FRAME, *self._dims(name, shape)) for name, (shape, _) in shapes.items()}
        create_arrays(group, missing, self.spec.chunks, self._count, dims)
        for name in shapes.keys() - missing.keys():
            remove_frames(group[name], folder.child(name), count)
            resize(group[name], self._count)
        coordinates = [name for name in TIMES if name in shapes and shapes[name][0] == ()]
        for name, coordinate in self._coordinates(shapes).items():
            self._write_coordinate(group, name, coordinate)
            coordinates += [name] if coordinate.dim != name else []
        group.attrs["coordinates"] = " ".join(coordinates)

    def _coordinates(self, names: Collection[str]) -> dict[str, Coordinate]:
        """Return the coordinates by name; those along the frames have as many values."""
        numbers = np.arange(self._count)
        coordinates = {
            FRAME: Coordinate(numbers, {}, FRAME),
            "step": Coordinate(self.spec.every * (numbers + 1), {}, FRAME),
        }
        for name in {*coordinates}.intersection([*names, *self.spec.dims]):
            del coordinates[name]  # a field or an axis has the name
        return coordinates | dict(self.spec.coords)

    def _dims(self, name: str, shape: Sequence[int]) -> list[str]:
        """Return the names of a field's axes; a field on faces has another length along some."""
        usual = zip(self.spec.dims, self._shape(self._first), shape, strict=False)
        return [
            dim if first_length == length else f"{dim}_{name}"
            for dim, first_length, length in usual
        ]

    def _write_coordinate(self, group: Any, name: str, coordinate: Coordinate) -> None:
        slices = dict(zip(self.spec.dims, self.spec.slices(len(self.spec.dims)), strict=True))
        values = coordinate.values[slices.get(name, slice(self._count))]
        if coordinate.dim == FRAME and len(values) < self._count:
            raise InputError(
                f"coords: expected a value for each of {self._count} frames, got {len(values)} in "
                f"{name!r}. Give more values."
            )
        if name in group and group[name].shape == values.shape:
            return
        options = named_axes(group.metadata.zarr_format, [coordinate.dim])
        array = group.create_array(name, data=values, overwrite=True, **options)
        array.attrs.update(coordinate.attributes)

    def _shares_chunks(self) -> bool:
        """Return whether this rank has a part of a chunk whose rest another rank has."""
        return any(
            rows.start < rows.stop
            and (rows.start % chunk or (rows.stop % chunk and rows.stop != length))
            for name, (global_slices, _) in self._parts.items()
            for rows, length, chunk in zip(
                global_slices,
                self._arrays[name].shape[1:],
                self._arrays[name].chunks[1:],
                strict=True,
            )
        )

    # --- frames

    def is_due(self, step: int) -> bool:
        """Return whether a frame is due after a step."""
        return step % self.spec.every == 0

    def copy(self, step: int, values: Values) -> None:
        """Copy this rank's part of a frame, which `write` writes."""
        self._number = step // self.spec.every - 1
        numbers = self._scalars.values
        for name in self._names:
            if name in numbers:
                self._copies[name] = np.asarray(numbers[name])
            else:
                self._copy_block(name, self._fields[name].newest.inner)
        for computed in self.spec.computed:
            call = partial(self._computed, computed, values)
            if comparison := self._comparisons[computed.name]:
                self._copy_block(
                    computed.name,
                    comparison(partial(self._by, computed, values), call, lambda block: [block]),
                )
            else:
                self._copy_block(computed.name, call())

    def _copy_block(self, name: str, block: Array) -> None:
        copy, device = self._copies[name], self._ctx.device
        if not np.can_cast(block.dtype, copy.dtype, "same_kind"):
            raise BlockMismatchError(
                f"expected values that become {copy.dtype} from the function of the computed field "
                f"{name!r}, as before the first step, got {block.dtype}. Return one dtype, "
                f"values.astype(...)."
            )
        np.copyto(copy, device.to_host(block[self._parts[name][1]]), casting="same_kind")

    def _computed(self, field: ComputedField, values: Values) -> Array:
        """Call the function of a computed field; return its local block without halo."""
        (block,) = self._by(field, values, (field.function, {}), self._first.layout.whole)
        return block

    def _by(
        self,
        field: ComputedField,
        values: Values,
        copies: tuple[Any, ...],  # of its function and keywords
        box: Box,
        watch: PositionWatch | None = None,
    ) -> list[Array]:
        """Call a function, of a computed field or its copy, for a box of the local block."""
        assert values is not None
        function, keywords = copies
        arguments = {**values(field.binding, box), **keywords}
        bound = field.binding.bound(function, watched(arguments, watch))
        value: Any = self._readers[field.name](bound)
        part, box_lengths = self._first.parts(box)[0], box_shape(box)
        shape = shape_of(f"compute[{field.name!r}]", value, type(part.data))
        if shape not in (box_lengths, part.data.shape):
            raise BlockMismatchError(
                f"expected an array of shape {box_lengths}, or {part.data.shape} with halo, from "
                f"the function of the computed field {field.name!r}, got {shape}. Return such an "
                f"array, or record a number, record={{...}}."
            )
        return [value if shape == box_lengths else value[part.inner]]

    def _comparison(self, field: ComputedField, local: LocalFields) -> Comparison:
        is_staggered = any(any(local_field.spec.extra) for local_field in local.fields.values())
        return Comparison(
            f"compute[{field.name!r}]",
            "a local block",
            "Record means and sums of the whole array, record={...}, and read them by at.last.",
            self._first.layout.whole,
            [count > 1 and not is_staggered for count in self._ctx.grid],
            [field.function, local.keywords],
            self._ctx.device.module,
        )

    def write(self) -> None:
        """Write the copied part of a frame."""
        with explained(self._folder):
            for name, copy in self._copies.items():
                if name not in self._fields:
                    if self._ctx.rank == 0:
                        self._arrays[name][self._number] = copy
                elif copy.size:
                    self._arrays[name][(self._number, *self._parts[name][0])] = copy

    def record(self, step: int) -> None:
        """Record in the store that all ranks have written the frame of a step. On rank 0."""
        with explained(self._folder):
            if not self._is_newest_run():
                raise another_run("frames", self._folder)
            self._group.attrs.update({"frames": step // self.spec.every, "steps": step})

    def sync(self) -> None:
        """Wait until all that this rank has written is on the disk."""
        with explained(self._folder):
            self._folder.sync()

    def close(self) -> None:
        """Let the arrays end with the last recorded frame, as far as possible. On rank 0."""
        if self._ctx.rank or not self._arrays:
            return
        with suppress(Exception):
            if self._is_newest_run() and (count := int(self._group.attrs["frames"])) < self._count:
                for _, array in self._group.arrays():
                    if _is_along_frames(array):
                        resize(array, count)

    def _is_newest_run(self) -> bool:
        return self._run.encode() in attributes_of(self._group, self._folder)


class BackgroundFrames:
    """Frames of one rank, of some groups: a thread writes them while steps go on.

    The next frame that is due waits for all ranks, and then the thread of rank 0 records the
    previous one. Ranks that share chunks write in turn, without a thread.
    """

    def __init__(self, ctx: Context, frames: Sequence[Frames]) -> None:
        self._ctx, self._frames = ctx, frames
        self._thread = ThreadPoolExecutor(1, "p2p-frames")  # which begins with the first frame
        self._writing: Future[None] | None = None
        # Frames that are written, or in the thread: each function records one in its store.
        self._unrecorded: list[Callable[[], None]] = []

    def frames_due(self, step: int) -> list[Frames]:
        """Return those with a frame after a step."""
        return [frames for frames in self._frames if frames.is_due(step)]

    def check(self) -> None:
        """Raise the error of a write that has ended."""
        if self._writing is not None and self._writing.done():
            self._wait()

    def write(self, step: int, values: Callable[[Sequence[Frames]], Values]) -> None:
        """Begin to write the frames that are due; `values` returns the values for them."""
        frames_to_write = self.frames_due(step)
        if not frames_to_write:
            return
        written = self._awaited()
        of_step = values(frames_to_write)
        for frames in frames_to_write:
            frames.copy(step, of_step)
        alone = [frames.write for frames in frames_to_write if not frames.in_turn]
        self._writing = self._thread.submit(_call, [*written, *alone])
        self._unrecorded = [partial(frames.record, step) for frames in frames_to_write]
        for frames in frames_to_write:
            for rank in range(self._ctx.size if frames.in_turn else 0):
                if rank == self._ctx.rank:
                    frames.write()
                self._ctx.barrier()

    def flush(self) -> None:
        """Wait until all ranks have written all frames to the disk; rank 0 records them."""
        self._wait()
        syncs = [frames.sync for frames in self._frames]
        _call(syncs)
        _call([*self._awaited(), *syncs])

    def close(self) -> None:
        """End the thread, after its frame, and all groups, after their last recorded frame."""
        self._thread.shutdown()
        for frames in self._frames:
            frames.close()

    def _awaited(self) -> list[Callable[[], None]]:
        """Wait until all ranks have written their frames; return the records for rank 0 to make."""
        self._wait()
        written, self._unrecorded = self._unrecorded, []
        if written:
            self._ctx.barrier()
        return written if self._ctx.rank == 0 else []

    def _wait(self) -> None:
        """Wait until the thread has written its frames; raise its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _call(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _is_along_frames(array: Any) -> bool:
    names = array.attrs.get("_ARRAY_DIMENSIONS") or array.metadata.dimension_names
    return names is not None and names[0] == FRAME


# Frames of a state: values that change in a loop of `Context.steps`.
#
# A thread of each rank writes its part of a frame while the next steps run, as for `iterate`.


class _StateReader:
    """Values of a state, read by `Frames` as fields and numbers."""

    def __init__(self, ctx: Context, values: StateValues) -> None:
        self._device, self._state = ctx.device, values
        kinds = dict(zip(values.names, values.kinds, strict=True))
        self._numbers = [name for name, kind in kinds.items() if kind == NUMBER]
        self.fields = {
            name: _StateArray(ctx, values, name) for name in kinds if kinds[name] == DIVIDED
        }

    @property
    def values(self) -> dict[str, Any]:
        """The numbers."""
        leaves = self._state.leaves()
        return {name: self._device.to_host(leaves[name].array)[()] for name in self._numbers}


class _StateArray:
    """One array of a state."""

    def __init__(self, ctx: Context, values: StateValues, name: str) -> None:
        self._values, self._name = values, name
        self.shape, self.box = tuple(map(sum, values.grid.chunks)), ctx.box

    @property
    def newest(self) -> Any:
        """The local block, as `inner`."""
        return SimpleNamespace(inner=self._values.leaves()[self._name].array)

    @property
    def spec(self) -> Any:
        """The dtype."""
        return SimpleNamespace(dtype=np.dtype(self.newest.inner.dtype))


class StateFrames:
    """The frames of one rank's state.

    Parameters
    ----------
    save : Save
        The arguments, without computed fields.
    ctx : Context
        The rank.
    state : State
        The values.
    steps : int or None
        Number of steps of the loop.

    Raises
    ------
    InputError
        If the number of steps is unknown, or `save` has other fields than the state.
    """

    def __init__(self, save: SaveArguments, ctx: Context, state: State, steps: int | None) -> None:
        if steps is None or save.compute:
            raise InputError(
                "save: expected a number of steps, and a Save without computed fields, got "
                f"{'ctx.steps(None)' if steps is None else 'compute='}. Give the number of steps, "
                "and keep computed values in the state."
            )
        values = StateValues(ctx, state)
        current: Any = _StateReader(ctx, values)
        names = [*current.fields, *current.values]
        if not current.fields:
            raise InputError(
                "save: expected a state with an array of the local block's shape, got none. Give "
                "ctx.state the array."
            )
        self._frames = Frames(
            checked_frames(save, names, (), values.grid.chunks), ctx, current, current, steps
        )
        self._written = BackgroundFrames(ctx, [self._frames])

    def resumed(self, first: int, steps: int | None) -> int:
        """Open the group for frames after a first step, which is returned."""
        self._frames.open(first, None)
        return first

    def is_due(self, step: int) -> bool:
        """Return whether a frame is due after a step."""
        return self._frames.is_due(step)

    def write(self, step: int, flush: Callable[[], None]) -> None:
        """Begin to write a frame."""
        self._written.write(step, lambda _: None)

    def flush(self) -> None:
        """Wait until all ranks have written all frames; rank 0 records them."""
        self._written.flush()

    def close(self) -> None:
        """End the thread."""
        self._written.close()
