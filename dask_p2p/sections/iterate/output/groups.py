"""Zarr groups that rank 0 of `iterate` creates, and all ranks open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dask_p2p.errors import FileError, InputError
from dask_p2p.ops.zarr_arrays import CONFIG, checksum, fast_compressor, zarr_format
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.iterate.output.folders import Folder, explained
from dask_p2p.sections.iterate.output.named_axes import named_axes

#: Shapes and dtypes of arrays by name.
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]


def together(ctx: Context, folder: Folder, work: Callable[[], None]) -> None:
    """Let rank 0 do some work, and all others wait for it."""
    if ctx.rank == 0:
        with explained(folder):
            work()
    ctx.barrier()


def opened(folder: Folder) -> Any:
    """Return the Zarr group in a folder. Raises `InputError` for an array, or other files."""
    import zarr

    try:
        found = zarr.open(folder.store, mode="r+")
    except FileNotFoundError:
        names = ", ".join(sorted(folder.names())[:3])
        raise InputError(
            f"expected a new folder, or a Zarr group, at {folder}, got a folder with {names}. Give "
            f"another path."
        ) from None
    if not isinstance(found, zarr.Group):
        raise InputError(f"expected a Zarr group at {folder}, got an array. Give another path.")
    return found


def seen_by_all(ctx: Context, folder: Folder) -> Any:
    """Return a group that rank 0 has made. Raises `FileError` unless all ranks see it."""
    if not is_seen_by_all(ctx, folder):
        raise not_seen(folder)
    with explained(folder):
        return opened(folder)


def is_seen_by_all(ctx: Context, folder: Folder) -> bool:
    """Return whether all ranks see a folder, or a file."""
    with explained(folder):
        is_seen = folder.exists()
    return bool(ctx.allreduce(int(is_seen), "min"))


def not_seen(folder: Folder) -> FileError:
    """Return the error of a folder that some ranks do not see."""
    return FileError(
        f"expected a folder that all workers see, got {folder}, which some do not. Give a path of "
        f"a shared file system."
    )


def attributes_of(group: Any, folder: Folder) -> bytes:
    """Return the text of a group's attributes as they are in its folder now."""
    return folder.child("zarr.json" if group.metadata.zarr_format == 3 else ".zattrs").read()


def another_run(kind: str, folder: Folder) -> FileError:
    """Return the error of a run that finds that a later one writes to its folder."""
    return FileError(
        f"expected one run at a time that writes {kind} at {folder}, got another one, which began "
        f"after this one. Give each run a path of its own."
    )


def created(folder: Folder, shapes: Shapes, attributes: Mapping[str, Any]) -> Any:
    """Create a group for arrays of some dtypes, in place of an earlier one."""
    import zarr

    version = zarr_format(dtype for _, dtype in shapes.values())
    options = {"zarr_format": version, "attributes": dict(attributes), "overwrite": True}
    return zarr.create_group(folder.store, **options)


def create_arrays(
    group: Any,
    shapes: Shapes,
    chunks: Sequence[int],
    frames: int | None = None,  # length of an axis before the others
    dims: Mapping[str, Sequence[str]] | None = None,  # by array: names of its axes, for xarray
) -> None:
    """Create arrays in a group; numbers have one chunk."""
    along = () if frames is None else (frames,)
    version = group.metadata.zarr_format
    for name, (shape, dtype) in shapes.items():
        own = (*(1 for _ in along), *chunks) if shape else along
        options = {"chunks": own, "config": CONFIG, "compressors": fast_compressor(version)}
        options |= named_axes(version, dims[name]) if dims else {}
        options |= {} if frames is None else checksum(version, options["compressors"])
        if frames is not None and dtype.kind in "fc":
            options["fill_value"] = np.nan  # of frames that are not written
        try:
            group.create_array(name, shape=(*along, *shape), dtype=dtype, **options)
        except ValueError as exc:
            if "data type" not in str(exc):
                raise
            raise InputError(
                f"expected dtypes that Zarr has, got {dtype} of {name}. Give another dtype, "
                f"{name}.astype(...)."
            ) from None


def stored(group: Any, name: str) -> Any:
    """Return an array of a group to write: with the configuration of `create_arrays`."""
    import zarr

    found = group[name]  # an array that is opened has Zarr's default configuration
    return zarr.Array(zarr.AsyncArray(found.metadata, found.store_path, CONFIG))


def resize(array: Any, frames: int) -> None:
    """Change the number of frames of an array; chunks of frames that it has no more stay."""
    from zarr.core.sync import sync

    if array.shape[0] != frames:
        sync(array.async_array.resize((frames, *array.shape[1:]), delete_outside_chunks=False))


def remove_frames(array: Any, folder: Folder, count: int) -> None:
    """Remove the chunks of all frames of an array but the first ones."""
    if array.metadata.zarr_format == 3:
        folder = folder.child("c")
    for name in folder.names():
        number = name.partition(".")[0]  # version 2 has files 3.0.0, version 3 folders 3/0
        if number.isdigit() and int(number) >= count:
            folder.child(name).remove()


def plain(shapes: Shapes) -> dict[str, Any]:
    """Return shapes and dtypes as JSON has them."""
    return {name: [list(shape), np.dtype(dtype).str] for name, (shape, dtype) in shapes.items()}


def difference(found: Any, wanted: Mapping[str, Any]) -> str:
    """Return a text of the entries that differ."""
    if not isinstance(found, Mapping):
        return "files of another program"
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    return ", ".join(f"{name} {found.get(name)} in place of {wanted.get(name)}" for name in names)
