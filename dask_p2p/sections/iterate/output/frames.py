"""The frames of one `Save`: each rank writes its part of the saved arrays, in a thread."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.geometry import Box, box_shape
from dask_p2p.sections.api.outputs import shape_of
from dask_p2p.sections.comparison import Comparison, Watch, watch_positions
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.state import DIVIDED, NUMBER, SavedValue
from dask_p2p.sections.gang.checkpoints import Period
from dask_p2p.sections.iterate.functions import Binding
from dask_p2p.sections.iterate.local_fields import LocalFields
from dask_p2p.sections.iterate.output.groups import (
    FRAME,
    TIMES,
    Coordinate,
    Folder,
    Shapes,
    check_seen,
    create_arrays,
    create_group,
    describe_shapes,
    difference,
    explain_errors,
    named_axes,
    newer_run_error,
    open_array,
    open_group,
    remove_frames,
    resize,
    run_on_first_rank,
)
from dask_p2p.sections.iterate.output.stores import FramesSpec, part_of_slice
from dask_p2p.sections.iterate.step import Reader
from dask_p2p.types import Array

#: Returns a function's arguments for a box of the local block, after the last step.
Arguments = Callable[[Binding, Box], Mapping[str, Any]]
Slices = tuple[slice, ...]


class Frames:
    """The frames of one rank: a thread writes them while steps go on.

    The next frame that is due waits for all ranks, and then the thread of rank 0 records the
    previous one. Ranks that share chunks write in turn, without a thread::

        steps    | 1 .. 50 |copy| 51 .. 100  |wait for all ranks, copy| 101 ..
        thread                  | frame 0 |                           | record 0, frame 1 |
    """

    is_resumed = False

    def __init__(
        self,
        spec: FramesSpec,
        ctx: Context,
        values: Callable[[], Mapping[str, SavedValue]],  # returns the current ones
        steps: int,  # of the run
        local: LocalFields | None = None,  # of `iterate`, for computed fields
        # Updates the halos of some fields; returns a function of arguments of computed fields.
        arguments: Callable[[Collection[str]], Arguments] | None = None,
    ) -> None:
        self.spec, self._ctx, self._values = spec, ctx, values
        self.schedule, self.reads_halos = Period(spec.every), bool(spec.computed)
        self._folder, self._count = Folder(spec.path), steps // spec.every
        current = values()
        numbers = {name for name, value in current.items() if value.kind == NUMBER}
        times = [name for name in TIMES if name in numbers and name not in spec.fields]
        self._names = (*spec.fields, *times)  # of arrays and numbers
        divided = {name: value for name, value in current.items() if value.kind == DIVIDED}
        first = next(iter(divided.values()))  # computed fields have its shape
        self._shape = first.shape
        blocks = {name: divided[name] for name in spec.fields if name in divided}
        blocks |= dict.fromkeys(spec.computed, first)
        #: By array: this rank's part, in the global array and in the local block.
        self._parts = {name: self._part(block.shape, block.box) for name, block in blocks.items()}
        self._lengths = {name: self._selected(block.shape) for name, block in blocks.items()}
        self._arguments = arguments
        if local is not None:
            self._first = next(iter(local.fields.values()))
            computed = spec.computed.items()
            self._readers = {name: Reader(ctx.device, field.function) for name, field in computed}
            self._comparisons = {name: self._comparison(name, local) for name in spec.computed}
        self._arrays: dict[str, Any] = {}  # of the store
        self._copies: dict[str, Array] = {}  # of the frame to write
        self._number = 0  # of that frame
        self._run = secrets.token_hex(8)  # in the store: the newest run that writes it
        self._in_turn = False  # whether ranks share chunks, and write in turn
        self._thread = ThreadPoolExecutor(1, "p2p-frames")  # which begins with the first frame
        self._writing: Future[None] | None = None
        self._unrecorded = 0  # step of a frame that is written, or in the thread; 0: none

    # --- before the first step

    def resume(self, first: int, steps: int | None) -> int:
        """Open the group for frames after a first step, which is returned."""
        shapes = self._shapes()
        run_on_first_rank(self._ctx, self._folder, partial(self._open, shapes, first))
        check_seen(self._ctx, self._folder)
        with explain_errors(self._folder):
            self._group = open_group(self._folder)
        self._arrays = {name: open_array(self._group, name) for name in shapes}
        for name, (global_rows, _) in self._parts.items():
            shape = tuple(rows.stop - rows.start for rows in global_rows)
            self._copies[name] = np.empty(shape, shapes[name][1])
        self._in_turn = bool(self._ctx.allreduce(int(self._shares_chunks()), "max"))
        return first

    def _shapes(self) -> Shapes:
        current, arguments = self._values(), self._computed_arguments()
        dtypes = {name: np.dtype(current[name].array.dtype) for name in self._names}
        for name in self.spec.computed:
            dtypes[name] = self._compute(name, arguments).dtype
        return {name: (self._lengths.get(name, ()), dtype) for name, dtype in dtypes.items()}

    def _computed_arguments(self) -> Any:
        names = set().union(*(field.binding.names for field in self.spec.computed.values()))
        return self._arguments(names) if self._arguments and self.spec.computed else None

    def _selected(self, shape: Sequence[int]) -> tuple[int, ...]:
        slices = self.spec.slices(len(shape))
        return tuple(len(range(n)[rows]) for n, rows in zip(shape, slices, strict=True))

    def _part(self, shape: Sequence[int], box: Box) -> tuple[Slices, Slices]:
        along = zip(self.spec.slices(len(shape)), shape, box, strict=True)
        pairs = [part_of_slice(selection, length, *bounds) for selection, length, bounds in along]
        return tuple(global_rows for global_rows, _ in pairs), tuple(rows for _, rows in pairs)

    def _open(self, shapes: Mapping[str, Any], first: int) -> None:
        """Create the group and its arrays, or compare them. On rank 0."""
        every, folder = self.spec.every, self._folder
        program = {"format": "dask_p2p frames 1", "every": every, "arrays": describe_shapes(shapes)}
        if self.spec.region:
            rows = zip(self._shape, self.spec.region, strict=True)
            program["region"] = [list(selection.indices(length)) for length, selection in rows]
        # A killed process leaves partial files.
        names = [name for name in folder.names() if not name.endswith(".partial")]
        group = open_group(folder) if names else None
        if group is None or not (group.attrs or [*group.array_keys()]):  # of a run that ended here
            attributes = {"program": program, "frames": 0, "steps": 0}
            group = create_group(folder, (dtype for _, dtype in shapes.values()), attributes)
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
        missing = {name: shapes[name] for name in shapes if name not in group}
        dims = {name: (FRAME, *self._dims(name, shape)) for name, (shape, _) in missing.items()}
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
        usual = zip(self.spec.dims, self._selected(self._shape), shape, strict=False)
        return [
            dim if first_length == length else f"{dim}_{name}"  # of a field on faces
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

    def write(self, step: int, flush: Callable[[], None] | None = None) -> None:
        """Begin to write the frame of a step; complete the one before."""
        written = self._wait_for_ranks()
        self._copy(step)
        if self._in_turn:
            self.record(written)
            for rank in range(self._ctx.size):
                if rank == self._ctx.rank:
                    self.write_part()
                self._ctx.barrier()
        else:
            self._writing = self._thread.submit(self.write_part, written)
        self._unrecorded = step

    def _copy(self, step: int) -> None:
        self._number = step // self.spec.every - 1
        current, arguments, device = self._values(), self._computed_arguments(), self._ctx.device
        for name in self._names:
            if name in self._parts:
                self._copy_block(name, current[name].array)
            else:
                self._copies[name] = np.asarray(device.to_host(current[name].array))
        for name in self.spec.computed:
            call = partial(self._compute, name, arguments)
            if comparison := self._comparisons[name]:
                compute = partial(self._compute_by, name, arguments)
                self._copy_block(name, comparison(compute, call, lambda block: [block]))
            else:
                self._copy_block(name, call())

    def _copy_block(self, name: str, block: Array) -> None:
        copy, device = self._copies[name], self._ctx.device
        if not np.can_cast(block.dtype, copy.dtype, "same_kind"):
            raise BlockMismatchError(
                f"expected values that become {copy.dtype} from the function of the computed field "
                f"{name!r}, as before the first step, got {block.dtype}. Return one dtype, "
                f"values.astype(...)."
            )
        np.copyto(copy, device.to_host(block[self._parts[name][1]]), casting="same_kind")

    def _compute(self, name: str, arguments: Arguments) -> Array:
        box = self._first.layout.local_box
        function = self.spec.computed[name].function
        (block,) = self._compute_by(name, arguments, (function, {}), box)
        return block

    def _compute_by(
        self,
        name: str,  # of a computed field
        arguments: Arguments,
        copies: tuple[Any, ...],  # of its function and keywords
        box: Box,
        watch: Watch | None = None,
    ) -> list[Array]:
        """Call a function, of a computed field or its copy, for a box of the local block."""
        (function, keywords), binding = copies, self.spec.computed[name].binding
        values = {**arguments(binding, box), **keywords}
        watched = values if watch is None else watch_positions(values, watch)
        value: Any = self._readers[name](binding.bind(function, watched))
        part, box_lengths = self._first.parts(box)[0], box_shape(box)
        shape = shape_of(f"compute[{name!r}]", value, type(part.data))
        if shape not in (box_lengths, part.data.shape):
            raise BlockMismatchError(
                f"expected an array of shape {box_lengths}, or {part.data.shape} with halo, from "
                f"the function of the computed field {name!r}, got {shape}. Return such an "
                f"array, or record a number, record={{...}}."
            )
        return [value if shape == box_lengths else value[part.inner]]

    def _comparison(self, name: str, local: LocalFields) -> Comparison:
        is_staggered = any(any(local_field.spec.extra) for local_field in local.fields.values())
        return Comparison(
            f"compute[{name!r}]",
            "a local block",
            "Record means and sums of the whole array, record={...}, and read them by at.last.",
            self._first.layout.local_box,
            [count > 1 and not is_staggered for count in self._ctx.grid],
            [self.spec.computed[name].function, local.keywords],
            self._ctx.device.module,
        )

    def write_part(self, written: int = 0) -> None:
        """Record that an earlier frame is written, and write the copied part of a frame."""
        self.record(written)
        with explain_errors(self._folder):
            for name, copy in self._copies.items():
                if name not in self._parts:
                    if self._ctx.rank == 0:
                        self._arrays[name][self._number] = copy
                elif copy.size:
                    self._arrays[name][(self._number, *self._parts[name][0])] = copy

    def record(self, step: int) -> None:
        """Record in the store that all ranks have written the frame of a step, unless it is 0."""
        if not step or self._ctx.rank:
            return
        with explain_errors(self._folder):
            if not self._is_newest_run():
                raise newer_run_error("frames", self._folder)
            self._group.attrs.update({"frames": step // self.spec.every, "steps": step})

    def flush(self) -> None:
        """Wait until all ranks have written all frames to the disk; rank 0 records them."""
        self._wait()
        self._folder.sync()
        self.record(self._wait_for_ranks())
        self._folder.sync()

    def _wait_for_ranks(self) -> int:
        self._wait()
        written, self._unrecorded = self._unrecorded, 0
        if written:
            self._ctx.barrier()
        return written  # the step to record, or 0

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread; let the arrays end with the last recorded frame, as far as possible."""
        self._thread.shutdown()
        if self._ctx.rank or not self._arrays:
            return
        with suppress(Exception):
            if self._is_newest_run() and (count := int(self._group.attrs["frames"])) < self._count:
                for _, array in self._group.arrays():
                    names = array.attrs.get("_ARRAY_DIMENSIONS") or array.metadata.dimension_names
                    if names and names[0] == FRAME:
                        resize(array, count)

    def _is_newest_run(self) -> bool:
        version = self._group.metadata.zarr_format
        attributes = self._folder.child("zarr.json" if version == 3 else ".zattrs").read()
        return self._run.encode() in attributes
