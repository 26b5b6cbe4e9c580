"""``.npy`` files, read and written through memory maps."""

from __future__ import annotations

import errno
import math
import os
import shutil
import stat
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from dask.utils import format_bytes
from numpy.lib import format as npy_format

from dask_p2p.errors import FileError
from dask_p2p.files.file_errors import file_errors, no_space, on_worker
from dask_p2p.files.tiling import tile_steps, tiles
from dask_p2p.layout import box_slices

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NpyArray", "create_npy", "open_npy"]

# Mapped pages count as memory of the process until they are unmapped, and Dask stops a worker
# that seems to have too much: map a file of any size in windows of this size.
_WINDOW_BYTES = 64 << 20

# Structured dtypes of thousands of fields exceed NumPy's 10,000; it is there against crashes of
# the parser, which reads literals only.
_MAX_HEADER_BYTES = 1 << 16

_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}


@dataclass(frozen=True)
class NpyArray:
    """An ``.npy`` file; small, since it travels to the workers in place of the data."""

    path: str
    name: str  # for messages about writing: the one that an unfinished output will get
    shape: tuple[int, ...]  # in the order of the file, the last axis contiguous
    dtype: np.dtype[Any]
    fortran: bool = False  # whether the logical shape is the reverse
    state: tuple[int, int] = (0, 0)  # bytes, and time of change in ns, to stay while it is read

    @property
    def chunks(self) -> tuple[int, ...]:
        """Extents that are best read whole: any will do."""
        return (1,) * len(self.shape)

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        return on_worker("read", self.path, lambda: self._read(place))

    def __setitem__(self, place: tuple[slice, ...], block: np.ndarray[Any, Any]) -> None:
        on_worker("write", self.name, lambda: self._copy(place, block, "r+"))

    def _read(self, place: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        self._check_unchanged()
        block = np.empty([side.stop - side.start for side in place], self.dtype)
        self._copy(place, block, "r")
        self._check_unchanged()
        return block

    def _copy(
        self, place: tuple[slice, ...], block: np.ndarray[Any, Any], mode: Literal["r", "r+"]
    ) -> None:
        """Copy a box out of the file, or into it, window by window."""
        steps = tile_steps(self.shape, max(1, _WINDOW_BYTES // max(1, self.dtype.itemsize)))
        for box in tiles(tuple((side.start, side.stop) for side in place), steps):
            sides = zip(box, place, strict=True)
            inside = tuple((lo - side.start, hi - side.start) for (lo, hi), side in sides)
            part = block[box_slices(inside)]
            mapped = _map(self.path, mode)
            window = (mapped.T if self.fortran else mapped)[box_slices(box)]
            if mode == "r":
                part[...] = window
            else:
                window[...] = part
                mapped.flush()  # else a disk that fails now would go unnoticed

    def _check_unchanged(self) -> None:
        now = _state(self.path)
        if now != self.state:
            raise FileError(
                f"{self.path} changed while it was read: it had {self.state[0]} bytes and has "
                f"{now[0]}; let nothing write to it, and run again"
            )


def _state(path: str) -> tuple[int, int]:
    info = os.stat(path)
    return info.st_size, info.st_mtime_ns


def _map(path: str, mode: Literal["r", "r+"]) -> np.memmap[Any, Any]:
    return npy_format.open_memmap(path, mode, max_header_size=_MAX_HEADER_BYTES)


def open_npy(path: str) -> NpyArray:
    """Read and check the header of an ``.npy`` file.

    Raises
    ------
    FileError
        If the file cannot be read, is no ``.npy`` file, is truncated, or holds Python objects.
    """
    with file_errors("read", path), open(path, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileError(f"{path} is no regular file; give an .npy file or a Zarr array")
        shape, fortran, dtype = _header(path, file)
        state, needed_bytes = _state(path), file.tell() + math.prod(shape) * dtype.itemsize
        if dtype.hasobject:
            raise FileError(
                f"{path} holds Python objects ({dtype}), which are pickles, and may run code when "
                "read; save it with a dtype of plain values"
            )
        if state[0] < needed_bytes:
            raise FileError(
                f"{path} is truncated: shape {shape} of {dtype} needs {needed_bytes} bytes, the "
                f"file has {state[0]}; copy or make it again"
            )
        dtype = _map(path, "r").dtype  # names of fields may be in UTF-8, which is not known above
    return NpyArray(path, path, shape[::-1] if fortran else shape, dtype, fortran, state)


def _header(path: str, file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype; leaves ``file`` where the data begin."""
    start = file.read(4)
    if start == b"PK\x03\x04":
        raise FileError(
            f"{path} is an .npz archive, whose arrays cannot be memory-mapped; load the one that "
            "you want and save it with numpy.save"
        )
    if start != npy_format.MAGIC_PREFIX[:4]:
        raise FileError(f"{path} is no .npy file: it begins with {start!r}; save with numpy.save")
    file.seek(0)
    try:
        first = npy_format.read_magic(file) == (1, 0)
        # 3.0 differs from 2.0 only in the encoding of the names of fields.
        read = npy_format.read_array_header_1_0 if first else npy_format.read_array_header_2_0
        shape, fortran, dtype = read(file, max_header_size=_MAX_HEADER_BYTES)
    except Exception as exc:  # the bytes may be anything, and so may the parser's complaint
        raise FileError(
            f"{path} has an .npy header that cannot be read; copy or make the file again"
        ) from exc
    if any(extent < 0 for extent in shape):
        raise FileError(f"{path} declares the impossible shape {shape}; make the file again")
    return shape, fortran, dtype


def create_npy(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NpyArray:
    """Create a file with its header, and reserve the space for all of its data.

    So a full disk is found before the work starts. While a map is written to, it would kill the
    process.

    Raises
    ------
    FileError
        If the folder cannot be written, or has not enough space.
    """
    with file_errors("write", name), warnings.catch_warnings():
        # A field name beyond Latin-1 needs version 3.0, which very old NumPy cannot read.
        warnings.filterwarnings("ignore", message="Stored array in format 3.0")
        memmap = npy_format.open_memmap(path, "w+", dtype, shape)
        size_bytes = memmap.offset + memmap.nbytes
        os.truncate(path, size_bytes)  # an empty array would have a byte too many
        _reserve(path, name, size_bytes)
    return NpyArray(str(path), name, shape, dtype)


def _reserve(path: Path, name: str, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    try:
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except (AttributeError, OSError) as exc:
        number = exc.errno if isinstance(exc, OSError) else errno.ENOSYS
        lacks = number in _CANNOT_RESERVE and free_bytes < size_bytes
        if lacks or number == errno.ENOSPC:
            raise no_space(name, format_bytes(size_bytes), free_bytes, path.parent) from exc
        if number not in _CANNOT_RESERVE:
            raise
