"""Zarr arrays in a folder, versions 2 and 3, through ``zarr`` 3, which is imported when used."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import shutil
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from dask.utils import format_bytes

from dask_p2p.errors import FileError
from dask_p2p.files.file_errors import file_errors, no_space, on_worker
from dask_p2p.files.tiling import input_box, tile_count, tile_steps, tiles, whole
from dask_p2p.types import Array

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dask_p2p.files.npy import NpyArray

__all__ = ["ZarrArray", "check_space", "create_zarr", "holds_zarr", "open_zarr", "stop_writers"]

_METADATA = ("zarr.json", ".zarray", ".zgroup")
_DIMENSIONS = "_ARRAY_DIMENSIONS"  # attribute where xarray keeps the names of a version 2 array
_COORDINATES = "coordinates"  # attribute that names them, of arrays and of groups
# Zarr would leave out chunks that equal the fill value, but takes -0j for 0j and any NaN for any
# other: values are to stay what they are, bit for bit.
_WRITE_ALL = {"array.write_empty_chunks": True}
_global_lock = threading.Lock()  # filters of warnings and Zarr's configuration are the process's

_STOP_TIMEOUT_S = 30
_POLL_S = 0.05
_SAMPLES = 8
_SAMPLE_BYTES = 1 << 20
_DOUBT = 0.8  # samples may compress less well than the rest: what may fit after all is tried


@contextlib.contextmanager
def _quiet_zarr() -> Iterator[Any]:
    """Give zarr, which writes all chunks, and takes what is outside the specification silently."""
    installed = "none"
    with contextlib.suppress(ImportError):
        import zarr

        installed = zarr.__version__
    if installed == "none" or int(installed.split(".")[0]) < 3:
        raise FileError(
            f"Zarr files need the package zarr, version 3 or later, and {installed} is here: "
            "pip install 'zarr>=3'"
        )
    with _global_lock, warnings.catch_warnings(), zarr.config.set(_WRITE_ALL):
        warnings.simplefilter("ignore")
        yield zarr


def holds_zarr(path: str | Path) -> bool:
    """Whether a folder holds a Zarr array or group."""
    return any(Path(path, name).exists() for name in _METADATA)


@dataclass(frozen=True)
class ZarrArray:
    """A Zarr array in a folder; small, since it travels to the workers in place of the data."""

    path: str  # of the array's folder, or of its group's if it is a member
    name: str  # for messages about writing: the one that an unfinished output will get
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]  # extents that are best read whole, and must be written whole
    member: str = ""  # name of the array in a group
    fortran: ClassVar[bool] = False  # the order inside of chunks is Zarr's affair

    def opened(self, mode: str = "r") -> Any:
        """Open it with Zarr."""
        with _quiet_zarr() as zarr:
            store = self.path if mode == "r" else _store_class()(self.path)
            return zarr.open_array(store, path=self.member, mode=mode)

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        return on_worker("read", self.path, lambda: self._read(place))

    def __setitem__(self, place: tuple[slice, ...], block: np.ndarray[Any, Any]) -> None:
        on_worker("write", self.name, lambda: self._write(place, block))

    def _read(self, place: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        array = self.opened()
        if (array.shape, array.dtype) != (self.shape, self.dtype):
            raise FileError(
                f"{self.path} changed while it was read: it was {self.shape} of {self.dtype} and "
                f"is {array.shape} of {array.dtype}; let nothing write to it, and run again"
            )
        return np.asarray(array[place], self.dtype)

    def _write(self, place: tuple[slice, ...], block: np.ndarray[Any, Any]) -> None:
        with _writing(self.path):  # to open the store makes its folder
            self.opened("r+")[place] = block


_lock = threading.Lock()
_writers: Counter[str] = Counter()  # by output
_stopped: set[str] = set()  # outputs that are given up; each has a name of its own


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    """Count as a writer of an output, unless it is given up."""
    with _lock:
        if path in _stopped:
            raise FileError(f"{path} is not written any more: the transpose failed or was stopped")
        _writers[path] += 1
    try:
        yield
    finally:
        with _lock:
            _writers[path] -= 1


@functools.cache
def _store_class() -> Any:
    """Make the class of stores whose writers can be waited for before their folder is removed.

    Zarr writes chunks in threads of its own, which go on after the first error. A chunk that comes
    after the removal would make the folder again.
    """
    from zarr.storage import LocalStore

    class Store(LocalStore):  # type: ignore[misc]
        async def set(self, key: str, value: Any) -> None:
            with _writing(str(self.root)):
                await super().set(key, value)

    return Store


async def stop_writers(path: str) -> None:
    """Let nobody in this process begin to write to an output, and wait until nobody does."""
    with _lock:
        _stopped.add(path)
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S
    while _writers[path] and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)


def open_zarr(path: str) -> ZarrArray:
    """Read and check the metadata of a Zarr array.

    Raises
    ------
    FileError
        If there is no readable array, or one of Python objects.
    """
    with file_errors("read", path), _quiet_zarr() as zarr:
        if not holds_zarr(path):
            raise FileError(
                f"{path} holds no Zarr array: there is neither zarr.json nor .zarray in it; give "
                "an .npy file or a Zarr array"
            )
        opened = zarr.open(path, mode="r")
        if isinstance(opened, zarr.Group):
            members = opened.members(max_depth=None)
            names = sorted(name for name, item in members if isinstance(item, zarr.Array))
            listed = ", ".join(f"{path}/{name}" for name in names)
            raise FileError(
                f"{path} is a Zarr group; "
                + (f"give one of its arrays: {listed}" if names else "there are no arrays in it")
            )
        # Reading a chunk must not unpickle it, and so perhaps run code.
        codecs = [*(opened.filters or ()), *(opened.compressors or ())]
        pickled = any(getattr(codec, "codec_id", None) == "pickle" for codec in codecs)
        if opened.dtype.hasobject or pickled:
            raise FileError(
                f"{path} holds Python objects or texts of any length ({opened.dtype}), which have "
                "no fixed size; save it with a dtype of plain values"
            )
    return ZarrArray(path, path, opened.shape, opened.dtype, opened.shards or opened.chunks)


def create_zarr(
    path: Path,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunks: tuple[int, ...],
    *,
    like: ZarrArray | None = None,
    axes: Sequence[int] = (),
) -> ZarrArray:
    """Make an empty Zarr array, which may be ``like`` another with its axes permuted.

    All but the shape and the order of axes is then taken over: format version, codecs, fill value,
    attributes; shards if the chunks are the same; and the group and the coordinates, if xarray
    wrote the other array into one.

    Raises
    ------
    FileError
        If the folder cannot be written, or Zarr has no such dtype.
    """
    chunks = tuple(max(1, size) for size in chunks)
    member = ""
    with file_errors("write", name), _quiet_zarr() as zarr:
        if like is not None:
            member = _create_like(zarr, path, shape, chunks, like, axes)
        else:
            # Version 3 has neither big-endian dtypes nor, in its specification, these other kinds.
            version = 3 if dtype.kind in "biufc" and dtype.isnative else 2
            zarr.create_array(path, shape=shape, dtype=dtype, chunks=chunks, zarr_format=version)
    return ZarrArray(str(path), name, shape, dtype, chunks, member)


def _create_like(
    zarr: Any,
    path: Path,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    like: ZarrArray,
    axes: Sequence[int],
) -> str:
    """Make the array, and the group around it if there is one; return its name in there."""

    def permuted(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[axis] for axis in axes)

    source = zarr.open_array(like.path, mode="r")
    options = _settings(source) | {"shape": shape, "dtype": source.dtype, "chunks": chunks}
    if source.shards and chunks == permuted(source.shards):
        options["chunks"] = permuted(source.chunks)
        place = source.metadata.codecs[0].index_location
        options["shards"] = {"shape": chunks, "index_location": place}
    options["attributes"] = dict(source.attrs)
    if _DIMENSIONS in source.attrs:
        options["attributes"][_DIMENSIONS] = [*permuted(source.attrs[_DIMENSIONS])]
    if names := getattr(source.metadata, "dimension_names", None):
        options["dimension_names"] = permuted(names)
    folder = Path(like.path)
    if not _dimensions(source) or not holds_zarr(folder.parent):
        zarr.create_array(path, **options)
        return ""
    group = zarr.open_group(folder.parent, mode="r")
    _copy_group(zarr, group, source, path)
    zarr.create_array(path, name=folder.name, **options)
    if group.metadata.consolidated_metadata:
        zarr.consolidate_metadata(path)
    return folder.name


def _settings(source: Any) -> dict[str, Any]:
    """How an array's chunks are stored, as `zarr.create_array` takes it."""
    metadata = source.metadata
    settings = {
        "zarr_format": metadata.zarr_format,
        "filters": source.filters or None,
        "compressors": source.compressors or None,
        "fill_value": source.fill_value,
    }
    if metadata.zarr_format == 2:
        keys = {"name": "v2", "separator": metadata.dimension_separator}
        return settings | {"order": source.order, "chunk_key_encoding": keys}
    keys = metadata.chunk_key_encoding
    return settings | {"serializer": source.serializer, "chunk_key_encoding": keys}


def _dimensions(array: Array) -> set[str]:
    """Names of the axes, as far as they have some."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get(_DIMENSIONS, ())
    return set(filter(None, names))


def _copy_group(zarr: Any, group: Any, array: Array, target: Path) -> None:
    """Copy a group's attributes, and the arrays that say where this one's elements lie."""
    version, folder = group.metadata.zarr_format, Path(array.store.root)
    zarr.create_group(target, zarr_format=version, attributes=dict(group.attrs))
    dimensions = _dimensions(array)
    texts = [node.attrs.get(_COORDINATES) for node in (array, group)]
    named = dimensions.union(*(text.split() for text in texts if isinstance(text, str)))
    for name in named - {folder.name}:
        coordinate = group.get(name)  # an axis need not have one
        if isinstance(coordinate, zarr.Array) and _dimensions(coordinate) <= dimensions:
            shutil.copytree(folder.parent / name, target / name)


def check_space(source: NpyArray | ZarrArray, target: ZarrArray, axes: Sequence[int]) -> None:
    """Refuse an output that the disk cannot hold, not even compressed as samples are."""
    folder = Path(target.path).parent
    free_bytes = shutil.disk_usage(folder).free
    size_bytes = math.prod(target.shape) * target.dtype.itemsize
    if size_bytes <= free_bytes:
        return
    needed_bytes = size_bytes * _compressed_share(source, target, axes)
    if _DOUBT * needed_bytes > free_bytes:
        about = f"about {format_bytes(int(needed_bytes))}"
        raise no_space(target.name, about, free_bytes, folder)


def _compressed_share(
    source: NpyArray | ZarrArray, target: ZarrArray, axes: Sequence[int]
) -> float:
    """Size of samples from all over the array, compressed, in parts of what it is otherwise."""
    steps = tile_steps(target.shape, max(1, _SAMPLE_BYTES // target.dtype.itemsize))
    every = -(-tile_count(target.shape, steps) // _SAMPLES)
    settings = _settings(target.opened())
    stored_bytes = sample_bytes = 0
    for box in itertools.islice(tiles(whole(target.shape), steps), 0, None, every):
        place = tuple(slice(*side) for side in input_box(box, axes))
        block = source[place].transpose(axes)
        with _quiet_zarr() as zarr:
            array = zarr.create_array({}, data=block, chunks=block.shape, **settings)
        stored_bytes += array.nbytes_stored()
        sample_bytes += block.nbytes
    return float(stored_bytes / sample_bytes)
