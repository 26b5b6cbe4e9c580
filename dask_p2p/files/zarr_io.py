"""Zarr arrays in a folder, versions 2 and 3, through ``zarr`` 3, which is imported when used."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import FileError
from dask_p2p.files.file_errors import file_errors
from dask_p2p.files.tiling import extents
from dask_p2p.files.writers import writing
from dask_p2p.files.zarr_groups import copy_group, is_consolidated
from dask_p2p.files.zarr_metadata import read_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dask_p2p.files.tiling import Box

__all__ = [
    "ZarrSource",
    "ZarrTarget",
    "compressed_bytes",
    "create_zarr",
    "holds_zarr",
    "open_zarr",
]

_METADATA = ("zarr.json", ".zarray", ".zgroup")
# Zarr would leave out chunks that equal the fill value, but takes -0j for 0j and any NaN for any
# other: values are to stay what they are, bit for bit.
_WRITE_ALL = {"array.write_empty_chunks": True}
_global_lock = threading.Lock()  # filters of warnings and Zarr's configuration are the process's


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as exc:
        raise FileError(
            "Zarr files need the package zarr, version 3 or later: pip install 'zarr>=3'"
        ) from exc
    if int(zarr.__version__.split(".")[0]) < 3:
        raise FileError(
            f"Zarr files need the package zarr, version 3 or later, and {zarr.__version__} is "
            "here: pip install 'zarr>=3'"
        )
    return zarr


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Say nothing of what is outside the specification: it is taken as it is."""
    with _global_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _open(path: str) -> Any:
    with _quiet():
        return _zarr().open(path, mode="r")


def holds_zarr(path: str) -> bool:
    """Whether a folder holds a Zarr array or group."""
    return any(os.path.exists(os.path.join(path, name)) for name in _METADATA)


@dataclass(frozen=True)
class ZarrSource:
    """A Zarr array to read; small, since it travels to the workers in place of the data.

    Parameters
    ----------
    path : str
        Absolute path of the array's folder.
    stored_shape : tuple of int
        Shape.
    dtype : numpy.dtype
        Type of the elements.
    chunks : tuple of int
        Extents that are best read whole.
    """

    path: str
    stored_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]

    @property
    def fortran(self) -> bool:
        """Never: the order inside of chunks is Zarr's affair."""
        return False

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        """Read a box.

        Raises
        ------
        FileError
            If the array is gone, unreadable, damaged, or not as it was when it was opened.
        """
        with file_errors("read", self.path, on_worker=True):
            found = _open(self.path)
            if (found.shape, found.dtype) != (self.stored_shape, self.dtype):
                raise FileError(
                    f"{self.path} changed while it was read: it was {self.stored_shape} of "
                    f"{self.dtype} and is {found.shape} of {found.dtype}; let nothing write to "
                    "it, and run again"
                )
            block = np.asarray(found[tuple(slice(*side) for side in box)], self.dtype)
            return block.reshape(extents(box))


def open_zarr(path: str) -> ZarrSource:
    """Read and check the metadata of a Zarr array.

    Raises
    ------
    FileError
        If there is no readable array, or one of Python objects.
    """
    zarr = _zarr()
    if not holds_zarr(path):
        raise FileError(
            f"{path} holds no Zarr array: there is neither zarr.json nor .zarray in it; give an "
            ".npy file or a Zarr array"
        )
    with file_errors("read", path):
        found = _open(path)
        if isinstance(found, zarr.Group):
            members = found.members(max_depth=None)
            names = sorted(name for name, item in members if isinstance(item, zarr.Array))
            listed = ", ".join(f"{path}/{name}" for name in names)
            raise FileError(
                f"{path} is a Zarr group; "
                + (f"give one of its arrays: {listed}" if names else "there are no arrays in it")
            )
        if found.dtype.hasobject or _pickles(found):
            raise FileError(
                f"{path} holds Python objects or texts of any length ({found.dtype}), which have "
                "no fixed size; save it with a dtype of plain values"
            )
        return ZarrSource(path, found.shape, found.dtype, found.shards or found.chunks)


def _pickles(found: Any) -> bool:
    """Whether reading a chunk would unpickle it, and so might run code."""
    codecs = [*(found.filters or ()), *(found.compressors or ())]
    return any(getattr(codec, "codec_id", None) == "pickle" for codec in codecs)


@functools.cache
def _store_class() -> Any:
    """Make the class of stores that are waited for before their folder is removed."""
    local_store = _zarr().storage.LocalStore

    class Store(local_store):  # type: ignore[misc, valid-type]
        async def set(self, key: str, value: Any) -> None:
            with writing(str(self.root)):
                await super().set(key, value)

    return Store


@dataclass(frozen=True)
class ZarrTarget:
    """A Zarr array that is being written.

    Parameters
    ----------
    path : str
        Absolute path of the output for the time being.
    final : str
        Name that it will get, for messages.
    member : str
        Name of the array in a group; empty if the output is the array.
    """

    path: str
    final: str
    member: str = ""

    @property
    def folder(self) -> Path:
        """Where the array lies."""
        return Path(self.path, self.member)

    def write(self, box: Box, block: np.ndarray[Any, Any]) -> None:
        """Write a box of whole chunks.

        Raises
        ------
        FileError
            If the disk is full, or the array is gone or cannot be written.
        """
        with file_errors("write", self.final, on_worker=True), writing(self.path):
            zarr = _zarr()
            store = _store_class()(self.path)
            # `open_array` takes a configuration too, but leaves it aside for what exists already.
            with _quiet(), zarr.config.set(_WRITE_ALL):
                array = zarr.open_array(store, path=self.member, mode="r+")
            array[tuple(slice(*side) for side in box)] = block

    def finish(self) -> None:
        """Wait until the disk has all files."""
        with file_errors("write", self.final):
            for folder, _, names in os.walk(self.path):
                for name in [*names, "."]:
                    fd = os.open(os.path.join(folder, name), os.O_RDONLY)
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)


def compressed_bytes(target: ZarrTarget, block: np.ndarray[Any, Any]) -> int:
    """Bytes that a block takes when it is stored with a target's codecs, as one chunk."""
    zarr = _zarr()
    from zarr.core.buffer.cpu import Buffer

    texts = read_metadata(target.folder).reshaped(block.shape, block.shape).texts()
    files = {name: Buffer.from_bytes(text.encode()) for name, text in texts.items()}
    store = zarr.storage.MemoryStore(files)
    with _quiet(), zarr.config.set(_WRITE_ALL):
        array = zarr.open_array(store, mode="r+")
    array[...] = block
    return int(array.nbytes_stored())


def create_zarr(
    path: Path,
    final: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunks: tuple[int, ...],
    *,
    like: ZarrSource | None = None,
    axes: Sequence[int] = (),
) -> ZarrTarget:
    """Make an empty Zarr array.

    Parameters
    ----------
    path, final : Path, str
        Name for the time being, and the one that it will get.
    shape, dtype, chunks : tuple, numpy.dtype, tuple
        Of the array.
    like : ZarrSource, optional
        Array that it is the transpose of. All but the shape and the order of axes is taken over:
        format version, codecs, fill value, attributes; shards if the chunks are the same; and the
        group and the coordinates, if xarray wrote the array into one.
    axes : sequence of int
        Axis of ``like`` that each axis comes from.

    Raises
    ------
    FileError
        If the folder cannot be written, or Zarr has no such dtype.
    """
    chunks = tuple(max(1, size) for size in chunks)
    with file_errors("write", final), _quiet():
        os.mkdir(path)  # refuses what is already there
        if like is not None:
            return _create_like(like, axes, path, final, shape, chunks)
        # Version 3 has neither big-endian dtypes nor, in its specification, these other kinds.
        version = 3 if dtype.kind in "biufc" and dtype.isnative else 2
        _zarr().create_array(path, shape=shape, dtype=dtype, chunks=chunks, zarr_format=version)
    return ZarrTarget(str(path), final)


def _create_like(
    like: ZarrSource,
    axes: Sequence[int],
    path: Path,
    final: str,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
) -> ZarrTarget:
    source = Path(like.path)
    metadata = read_metadata(source).transposed(axes)
    if chunks != tuple(like.chunks[axis] for axis in axes):
        metadata = metadata.reshaped(shape, chunks)
    target = ZarrTarget(str(path), final, copy_group(source, path))
    target.folder.mkdir(exist_ok=True)
    metadata.write(target.folder)
    if target.member and is_consolidated(source.parent):
        _zarr().consolidate_metadata(path)
    return target
