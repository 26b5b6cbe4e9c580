"""The NumPy backend: the reference that every other one equals bit for bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_p2p.backends.base import Backend, is_plain
from dask_p2p.backends.host import HostQueue, cpu_name, permute_into
from dask_p2p.errors import UnsupportedArrayError
from dask_p2p.types import Array, DTypeLike


class NumpyBackend(Backend):
    """NumPy arrays of any dtype, in host memory."""

    name = "numpy"
    title = "NumPy"
    on_device = False
    holds_objects = True
    most_probe_bytes = 32 * 2**20
    fft_modules = ("scipy.fft", "numpy.fft")

    @property
    def module(self) -> Any:
        return np

    def check(self, block: Array) -> None:
        if isinstance(block, np.ma.MaskedArray):
            raise UnsupportedArrayError(
                "expected a plain numpy.ndarray, got a numpy.ma.MaskedArray, whose mask would be "
                "lost. Fill it first (map_blocks(np.ma.filled)), or move data and mask separately."
            )
        if isinstance(block, np.matrix):
            raise UnsupportedArrayError(
                "expected a plain numpy.ndarray, got a numpy.matrix, which always has two axes. "
                "Convert it first: map_blocks(np.asarray)."
            )
        if not isinstance(block, np.ndarray) or not is_plain(block):
            raise UnsupportedArrayError(
                f"expected a numpy.ndarray, got {type(block).__name__} of NumPy. Convert it first: "
                "map_blocks(np.asarray)."
            )

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray[Any, Any]:
        return np.empty(tuple(shape), dtype)

    permute_into = staticmethod(permute_into)

    def queue(self, *, leave_bandwidth: bool = False) -> HostQueue:
        return HostQueue(self)

    def to_host(self, array: Array) -> Any:
        return array

    def allocate(self, size_bytes: int) -> Any:
        return np.empty(size_bytes, np.uint8)

    def bytes_of(self, memory: Any, size_bytes: int, owner: Any) -> Any:
        return np.asarray(owner)

    def is_in_use(self) -> bool:
        return True

    def memory_below(self, wanted_bytes: int, worker_limit_bytes: int | None) -> int | None:
        limit_bytes = worker_limit_bytes or wanted_bytes
        return limit_bytes if limit_bytes < wanted_bytes else None

    device_name = staticmethod(cpu_name)

    def checksum(self, array: Array) -> int:
        if not array.nbytes:
            return 0
        return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view("u1").data)


NUMPY = NumpyBackend()
