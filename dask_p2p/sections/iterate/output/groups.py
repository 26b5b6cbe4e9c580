"""Zarr groups that rank 0 of `iterate` creates, and all ranks open."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np

from dask_p2p.backends.base import check_plain
from dask_p2p.errors import FileError, InputError, MissingPackageError, P2PError, needs
from dask_p2p.geometry import Chunks, block_bounds
from dask_p2p.sections.context.context import Context
from dask_p2p.types import DType

_MOST_PARTS = 16  # chunks of a store for each block of an array

#: Shapes and dtypes of arrays by name.
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]


def run_on_first_rank(ctx: Context, folder: Folder, work: Callable[[], None]) -> None:
    """Let rank 0 do some work, and all others wait for it."""
    if ctx.rank == 0:
        with explain_errors(folder):
            work()
    ctx.barrier()


def open_group(folder: Folder) -> Any:
    """Return the Zarr group in a folder. Raises `InputError` for an array, or other files."""
    import zarr

    try:
        node = zarr.open(folder.store, mode="r+")
    except FileNotFoundError:
        names = ", ".join(sorted(folder.names())[:3])
        raise InputError(
            f"expected a new folder, or a Zarr group, at {folder}, got a folder with {names}. Give "
            f"another path."
        ) from None
    if not isinstance(node, zarr.Group):
        raise InputError(f"expected a Zarr group at {folder}, got an array. Give another path.")
    return node


def check_seen(ctx: Context, folder: Folder, check_run: Callable[[], None] = lambda: None) -> None:
    """Raise `FileError` unless all ranks see a folder, or a file, that rank 0 has made.

    `check_run` raises the error of rank 0 if another run has removed it.
    """
    with explain_errors(folder):
        is_seen = folder.exists()
    if not ctx.allreduce(int(is_seen), "min"):
        run_on_first_rank(ctx, folder, check_run)
        raise FileError(
            f"expected a folder that all workers see, got {folder}, which some do not. Give a path "
            f"of a shared file system."
        )


def newer_run_error(kind: str, folder: Folder) -> FileError:
    """Return the error of a run that finds that a later one writes to its folder."""
    return FileError(
        f"expected one run at a time that writes {kind} at {folder}, got another one, which began "
        f"after this one. Give each run a path of its own."
    )


def create_group(folder: Folder, dtypes: Iterable[DType], attributes: Mapping[str, Any]) -> Any:
    """Create a group for arrays of some dtypes, in place of an earlier one."""
    import zarr

    options = {"zarr_format": zarr_format(dtypes), "attributes": attributes, "overwrite": True}
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
        chunk_shape = (*(1 for _ in along), *chunks) if shape else along
        options = {"chunks": chunk_shape, "config": CONFIG, **_codecs(version, frames is not None)}
        options |= named_axes(version, dims[name]) if dims else {}
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


def open_array(group: Any, name: str) -> Any:
    """Return an array of a group to write: with the configuration of `create_arrays`."""
    import zarr

    array = group[name]  # an array that is opened has Zarr's default configuration
    return zarr.Array(zarr.AsyncArray(array.metadata, array.store_path, CONFIG))


def resize(array: Any, frames: int) -> None:
    """Change the number of frames of an array; chunks of frames that it has no more stay."""
    from zarr.core.sync import sync

    sync(array.async_array.resize((frames, *array.shape[1:]), delete_outside_chunks=False))


def remove_frames(array: Any, folder: Folder, count: int) -> None:
    """Remove the chunks of all frames of an array but the first ones."""
    if array.metadata.zarr_format == 3:
        folder = folder.child("c")
    for name in folder.names():
        number = name.partition(".")[0]  # version 2 has files 3.0.0, version 3 folders 3/0
        if number.isdigit() and int(number) >= count:
            folder.child(name).remove()


def describe_shapes(shapes: Shapes) -> dict[str, Any]:
    """Return shapes and dtypes as JSON has them."""
    return {name: [list(shape), np.dtype(dtype).str] for name, (shape, dtype) in shapes.items()}


def difference(stored_program: Any, program: Mapping[str, Any]) -> str:
    """Return a text of the entries that differ."""
    if not isinstance(stored_program, Mapping):
        return "files of another program"
    names = [
        name
        for name in {**program, **stored_program}
        if stored_program.get(name) != program.get(name)
    ]
    return ", ".join(
        f"{name} {stored_program.get(name)} in place of {program.get(name)}" for name in names
    )


class Folder:
    """A folder by its path or URL.

    Raises `MissingPackageError` if a package for the URL is not installed, and `InputError` for an
    unknown URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        if "\0" in path:
            raise InputError(f"expected a path without null characters, got {path!r}. Rename it.")
        with needs("fsspec", "zarr"):
            from fsspec.core import url_to_fs
        try:
            self._files, self._root = url_to_fs(path)
        except ImportError as exc:
            raise MissingPackageError(
                f"expected a package that opens {path!r}, which is not installed: {exc}."
            ) from exc
        except ValueError as exc:
            raise InputError(
                f"expected a path, or a URL that fsspec opens, got {path!r}: {exc}. Give another "
                f"one."
            ) from exc

    def __str__(self) -> str:
        return self.path

    def child(self, name: str) -> Folder:
        """Return a folder, or a file, in this one."""
        return Folder(f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    @cached_property
    def store(self) -> Any:
        """The folder as Zarr takes it."""
        if self._is_local:
            return _local_store()(self._root)
        from zarr.storage import FsspecStore

        return FsspecStore.from_url(self.path)

    @property
    def _is_local(self) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self._files, LocalFileSystem)

    def sync(self) -> None:
        """Wait until all that this process has written to the store is on the disk."""
        if self._is_local:
            with explain_errors(self):
                self.store.sync()

    def exists(self) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(self._root))

    def names(self) -> list[str]:
        """Return the names of all files and folders in this one; none if it does not exist.

        Raises `NotADirectoryError` for a file.
        """
        self._files.invalidate_cache()
        if self._files.isfile(self._root):
            raise NotADirectoryError(f"{self.path} is a file")
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def make(self) -> None:
        """Create the folder, unless it exists."""
        self._files.makedirs(self._root, exist_ok=True)

    def read(self) -> bytes:
        contents: bytes = self._files.cat_file(self._root)
        return contents

    def write(self, contents: bytes) -> None:
        """Create the file, with its contents on the disk; it is never there without them."""
        if not self._is_local:
            self._files.pipe_file(self._root, contents)
            return
        partial = f"{self._root}.partial"
        with open(partial, "wb") as file:
            file.write(contents)
        _sync_path(partial)
        os.replace(partial, self._root)
        _sync_path(os.path.dirname(self._root))

    def touch(self) -> None:
        self._files.touch(self._root)

    def remove(self) -> None:
        """Remove the folder or file, as far as possible."""
        with suppress(OSError):
            self._files.rm(self._root, recursive=True)


@cache
def _local_store() -> Any:
    """Return a class of Zarr's stores in local folders that records the files it has written."""
    from zarr.storage import LocalStore

    class RecordingStore(LocalStore):  # type: ignore[misc]
        """Each write of a file is atomic, and is on the disk after `sync`."""

        def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
            super().__init__(root, read_only=read_only)
            self._written = set[Path]()

        async def set(self, key: str, value: Any) -> None:
            self._written.add(self.root / key)
            await super().set(key, value)

        def set_sync(self, key: str, value: Any) -> None:  # of newer versions of Zarr
            self._written.add(self.root / key)
            super().set_sync(key, value)

        def sync(self) -> None:
            """Wait until the files are on the disk."""
            files, self._written = self._written, set()
            for file in files:
                _sync_path(file)
            depth = len(self.root.parent.parts)
            for folder in {parent for file in files for parent in file.parents}:
                if len(folder.parts) >= depth:
                    with suppress(OSError):  # some file systems have no such call for folders
                        _sync_path(folder)

    return RecordingStore


def _sync_path(path: str | Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def absolute(path: Any) -> str:
    """Return an absolute path, or a URL unchanged; checks both like `Folder`."""
    if not isinstance(path, (str, Path)):
        raise InputError(
            f"expected the path or URL of a folder that all workers can write, got {path!r}. Give "
            f"a path of a shared file system."
        )
    location = str(path) if "://" in str(path) else os.path.abspath(path)
    Folder(location)
    return location


@contextmanager
def explain_errors(folder: Folder) -> Iterator[None]:
    """Name the store in errors of the file system, and of Zarr. Only for calls of these."""
    try:
        yield
    except (P2PError, MemoryError):
        raise
    except Exception as exc:
        cause = exc if isinstance(exc, OSError) else f"{type(exc).__name__}: {exc}"
        raise FileError(
            f"expected a folder that can be written at {folder}, got {cause}. Make room, or give "
            f"another path."
        ) from exc


#: Name of the axis of frames.
FRAME = "frame"
#: Names of numbers that are coordinates of the frames.
TIMES = "t", "time"


@dataclass(frozen=True)
class Coordinate:
    """Values along an axis of frames."""

    values: Any
    attributes: Mapping[str, Any]
    dim: str


def checked_dims(names: Any, ndim: int) -> tuple[str, ...]:
    """Return the names of all axes but that of frames. Raises `InputError` for other names."""
    dims = [f"dim_{axis}" for axis in range(ndim)] if names is None else names
    is_valid = isinstance(dims, Sequence) and len({*dims}) == len(dims) == ndim
    if not is_valid or not all(isinstance(name, str) and name != FRAME for name in dims):
        raise InputError(
            f"dims: expected {ndim} different names of axes, none of them {FRAME!r}, got "
            f"{names!r}. Give a name for each axis of the fields."
        )
    return tuple(dims)


def checked_coords(
    coords: Any,
    axes: Mapping[str, int],  # lengths by name
    names: Collection[str],  # of the fields
) -> dict[str, Coordinate]:
    """Return coordinates by the name of their axis. Raises `InputError` for other values."""
    if not isinstance(coords, Mapping):
        raise InputError(
            f"coords: expected a mapping of arrays by the names of axes, got "
            f"{type(coords).__name__}. Give {{'y': latitudes}}."
        )
    coordinates, lengths = {}, {FRAME: None, **axes}
    for name, values in dict(coords).items():
        check_plain(f"coords[{name!r}]", values)
        array = np.asarray(values)
        length = lengths.get(name, -1)
        is_valid = array.ndim == 1 and array.dtype.kind in "biuf" and name not in names
        if not is_valid or length not in (None, len(array)):
            raise InputError(
                f"coords: expected one-dimensional arrays of numbers, as long as the axes "
                f"{[*lengths]}, got {name!r} with {array.dtype} of shape {array.shape}. Leave it "
                f"out, or convert it."
            )
        coordinates[name] = Coordinate(array, dict(getattr(values, "attrs", {})), name)
    return coordinates


def named_axes(version: int, dims: Sequence[str]) -> dict[str, Any]:
    """Return the keywords of a Zarr array whose axes have names, as xarray reads them."""
    if version == 2:
        return {"attributes": {"_ARRAY_DIMENSIONS": [*dims]}}
    return {"dimension_names": [*dims]}


#: Configuration of arrays: Zarr takes -0j for the fill value 0j, and would omit such chunks.
CONFIG = {"write_empty_chunks": True}


def zarr_format(dtypes: Iterable[DType]) -> int:
    """Return the version of Zarr's format that holds all these dtypes.

    The specification of version 3 has neither big-endian dtypes nor kinds other than numbers.
    """
    return 3 if all(dtype.kind in "biufc" and dtype.isnative for dtype in dtypes) else 2


def _codecs(version: int, has_checksums: bool) -> dict[str, Any]:
    """Return the codecs of arrays that a program writes while it computes.

    Compression takes a quarter of the time of Zarr's default, and fields of floats become smaller.
    Each reader compares the checksums of chunks.
    """
    if version == 2:
        from numcodecs import CRC32C, Blosc

        compressor = Blosc(cname="lz4", clevel=1, shuffle=Blosc.SHUFFLE)
        return {"compressors": compressor} | ({"filters": [CRC32C()]} if has_checksums else {})
    from zarr.codecs import BloscCodec, Crc32cCodec

    codec = BloscCodec(cname="lz4", clevel=1, shuffle="shuffle")
    return {"compressors": [codec, Crc32cCodec()] if has_checksums else codec}


def store_chunks(chunks: Chunks) -> tuple[int, ...]:
    """Return chunks of a store: of one size along each axis, and whole ones in each block."""
    sizes = []
    for along in chunks:
        size = max(1, along[0])
        if any(length != size for length in along[:-1]) or along[-1] > size:
            size = gcd(*block_bounds(along)[1:-1]) or 1
        sizes.append(size)
    count = prod(-(-sum(along) // size) for along, size in zip(chunks, sizes, strict=True))
    if count > _MOST_PARTS * prod(map(len, chunks)):
        raise InputError(
            f"expected fields with chunks that divide into chunks of one size, which Zarr needs, "
            f"got {chunks}. Rechunk them first, dask_p2p.rechunk(x, ...)."
        )
    return tuple(sizes)
