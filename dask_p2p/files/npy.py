"""``.npy`` files: boxes read through memory maps, boxes written at their place."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import shutil
import stat
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from dask.utils import format_bytes

from dask_p2p.errors import FileError
from dask_p2p.files.file_errors import file_errors, no_space
from dask_p2p.files.tiling import extents
from dask_p2p.files.writers import writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dask_p2p.files.tiling import Box

__all__ = ["NpySource", "NpyTarget", "create_npy", "open_npy"]

# Mapped pages count as memory of the process until they are unmapped, and Dask stops a worker
# that seems to have too much: map a file of any size in parts of this size.
_MAP_BYTES = 64 << 20

_WRITE_BYTES = 1 << 30  # one system call writes less than 2 GiB

# Structured dtypes of thousands of fields exceed NumPy's 10,000; it is there against crashes of
# the parser, which reads literals only.
_MAX_HEADER_BYTES = 1 << 16

_NO_RESERVE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}


@dataclass(frozen=True)
class NpySource:
    """An ``.npy`` file to read; small, since it travels to the workers in place of the data.

    Parameters
    ----------
    path : str
        Absolute path.
    stored_shape : tuple of int
        Shape in the order of the file, the last axis contiguous: reversed for a Fortran file.
    dtype : numpy.dtype
        Type of the elements.
    fortran : bool
        Whether the logical shape is the reverse of ``stored_shape``.
    offset_bytes : int
        Where the data begin.
    state : tuple of int
        Size in bytes and modification time in ns that the file must keep while it is read.
    """

    path: str
    stored_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    offset_bytes: int
    state: tuple[int, int]

    @property
    def chunks(self) -> tuple[int, ...]:
        """Extents that are best read whole: any will do."""
        return (1,) * len(self.stored_shape)

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        """Copy a box, given in stored order, out of the file.

        Raises
        ------
        FileError
            If the file is gone, unreadable, or not as it was when it was opened.
        """
        with file_errors("read", self.path, on_worker=True), open(self.path, "rb") as file:
            self._check_unchanged(file)
            block = np.empty(extents(box), self.dtype)
            if block.nbytes:
                _copy_mapped(file, self.offset_bytes, self.stored_shape, box, block)
            self._check_unchanged(file)
        return block

    def _check_unchanged(self, file: BinaryIO) -> None:
        now = _state(file)
        if now != self.state:
            raise FileError(
                f"{self.path} changed while it was read: it had {self.state[0]} bytes and has "
                f"{now[0]}; let nothing write to it, and run again"
            )


def _state(file: BinaryIO) -> tuple[int, int]:
    info = os.fstat(file.fileno())
    return info.st_size, info.st_mtime_ns


def _copy_mapped(
    file: BinaryIO,
    offset_bytes: int,
    shape: tuple[int, ...],
    box: Box,
    out: np.ndarray[Any, Any],
) -> None:
    """Copy a box of a C-ordered array in a file, mapping little of the file at a time."""
    row_bytes = math.prod(shape[1:]) * out.itemsize
    if len(shape) > 1 and row_bytes > _MAP_BYTES:
        for k, row in enumerate(range(*box[0])):
            _copy_mapped(file, offset_bytes + row * row_bytes, shape[1:], box[1:], out[k])
        return
    if not shape:
        out[...] = np.memmap(file, out.dtype, "r", offset_bytes, shape)
        return
    inner = tuple(slice(*side) for side in box[1:])
    start, stop = box[0]
    step = max(1, _MAP_BYTES // row_bytes)
    for lo in range(start, stop, step):
        hi = min(lo + step, stop)
        at_bytes = offset_bytes + lo * row_bytes
        rows = np.memmap(file, out.dtype, "r", at_bytes, (hi - lo, *shape[1:]))
        out[lo - start : hi - start] = rows[:, *inner]


def open_npy(path: str) -> NpySource:
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
        offset_bytes = file.tell()
        state = _state(file)
    if dtype.hasobject:
        raise FileError(
            f"{path} holds Python objects ({dtype}), which are pickles, and may run code when "
            "read; save it with a dtype of plain values"
        )
    expected_bytes = offset_bytes + math.prod(shape) * dtype.itemsize
    if state[0] < expected_bytes:
        raise FileError(
            f"{path} is truncated: shape {shape} of {dtype} needs {expected_bytes} bytes, the "
            f"file has {state[0]}; copy or make it again"
        )
    stored = shape[::-1] if fortran else shape
    return NpySource(path, stored, dtype, fortran, offset_bytes, state)


def _header(path: str, file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype; leaves ``file`` where the data begin."""
    start = file.read(4)
    if start == b"PK\x03\x04":
        raise FileError(
            f"{path} is an .npz archive, whose arrays cannot be memory-mapped; load the one that "
            "you want and save it with numpy.save"
        )
    file.seek(0)
    if start != b"\x93NUM":
        raise FileError(f"{path} is no .npy file: it begins with {start!r}; save with numpy.save")
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            # 3.0 differs from 2.0 only in the encoding of field names, which are asked below.
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read(file, max_header_size=_MAX_HEADER_BYTES)
        if version == (3, 0) and not dtype.hasobject:
            dtype = np.lib.format.open_memmap(path, mode="r").dtype
    except Exception as exc:  # the bytes may be anything, and so may the parser's complaint
        raise FileError(
            f"{path} has an .npy header that cannot be read; copy or make the file again"
        ) from exc
    if any(extent < 0 for extent in shape):
        raise FileError(f"{path} declares the impossible shape {shape}; make the file again")
    return shape, fortran, dtype


@dataclass(frozen=True)
class NpyTarget:
    """An ``.npy`` file that is being written, C-ordered.

    Parameters
    ----------
    path : str
        Absolute path for the time being.
    final : str
        Name that it will get, for messages.
    shape : tuple of int
        Shape of the array.
    dtype : numpy.dtype
        Type of the elements.
    offset_bytes : int
        Where the data begin.
    """

    path: str
    final: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset_bytes: int

    def write(self, box: Box, block: np.ndarray[Any, Any]) -> None:
        """Write a box and wait until the disk has it.

        Not through a memory map: there, a disk that is full after all would kill the process.

        Raises
        ------
        FileError
            If the disk is full, or the file is gone or cannot be written.
        """
        block = np.ascontiguousarray(block, self.dtype)
        data = memoryview(block.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        on_worker = file_errors("write", self.final, on_worker=True)
        with on_worker, writing(self.path), _opened(self.path) as fd:
            done_bytes = 0
            for at, count in _runs(self.shape, box):
                run_bytes = count * self.dtype.itemsize
                at_bytes = self.offset_bytes + at * self.dtype.itemsize
                _write_at(fd, data[done_bytes : done_bytes + run_bytes], at_bytes)
                done_bytes += run_bytes
            os.fsync(fd)

    def finish(self) -> None:
        """Wait until the disk has header and data."""
        with file_errors("write", self.final), _opened(self.path) as fd:
            os.fsync(fd)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)  # not swallowed: a network file system tells of a full disk here


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """First element and count of each contiguous run of a box, in order."""
    whole = len(shape)  # axes from here on are whole, so runs go on through them
    while whole and extents(box)[whole - 1] == shape[whole - 1]:
        whole -= 1
    lead = max(whole - 1, 0)  # the runs begin along the axis before
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    count = math.prod(extents(box)[lead:])
    first = sum(side[0] * stride for side, stride in zip(box, strides, strict=True))
    for index in itertools.product(*(range(n) for n in extents(box)[:lead])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), count


def _write_at(fd: int, data: memoryview, at_bytes: int) -> None:
    while data:
        written = os.pwrite(fd, data[:_WRITE_BYTES], at_bytes)
        data = data[written:]
        at_bytes += written


def create_npy(path: Path, final: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NpyTarget:
    """Make a new file with its header, and reserve the space for all of its data.

    Raises
    ------
    FileError
        If the folder cannot be written, or has not enough space.
    """
    with file_errors("write", final):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
        with warnings.catch_warnings():
            # A field name beyond Latin-1 needs version 3.0, which very old NumPy cannot read.
            warnings.filterwarnings("ignore", message="Stored array in format 3.0")
            made = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        offset_bytes = made.offset
        _reserve(path, final, offset_bytes + made.nbytes)
        os.truncate(path, offset_bytes + made.nbytes)
    return NpyTarget(str(path), final, shape, dtype, offset_bytes)


def _reserve(path: Path, final: str, size_bytes: int) -> None:
    """Take the space on the disk now, so that a full disk is found before the work."""
    free_bytes = shutil.disk_usage(path.parent).free
    try:
        with _opened(str(path)) as fd:
            os.posix_fallocate(fd, 0, size_bytes)
    except (AttributeError, OSError) as exc:
        number = exc.errno if isinstance(exc, OSError) else errno.ENOSYS
        lacks = number == errno.ENOSPC or (number in _NO_RESERVE and free_bytes < size_bytes)
        if lacks:
            raise no_space(final, format_bytes(size_bytes), free_bytes, path.parent) from exc
        if number not in _NO_RESERVE:
            raise
