"""Descriptors of regions in GPU memory, which ranks send to each other."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Any, TypeAlias

from dask_p2p.interprocess import cuda_ipc
from dask_p2p.sections.gpu.windows import PeerMemory
from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.types import DType

#: Number, shape, strides, and CUDA IPC handle.
RegionPiece: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], cuda_ipc.IpcHandle]


@lru_cache(maxsize=64)  # repeated calls use the same memory
def pack_descriptor(axis: int, pieces: tuple[RegionPiece, ...]) -> bytes:
    """Return the descriptor of a region: its axis, and the handles of its pieces."""
    return json.dumps(
        (axis, [(*piece, asdict(ipc_handle)) for *piece, ipc_handle in pieces])
    ).encode()


@lru_cache(maxsize=64)
def _parse_descriptor(text: bytes) -> tuple[int, list[RegionPiece]]:
    """Return the axis and the pieces of a descriptor."""
    axis, pieces = json.loads(text)
    return axis, [
        (number, tuple(length), tuple(strides), cuda_ipc.IpcHandle(**ipc_handle))
        for number, length, strides, ipc_handle in pieces
    ]


def map_descriptor(
    of: PeerMemory, descriptor: Buffer, dtype: DType
) -> tuple[int, list[tuple[int, Any]]]:
    """Return another rank's region, mapped here: its axis, and its pieces with their numbers."""
    axis, pieces = _parse_descriptor(bytes(descriptor))
    return axis, [
        (number, _piece(of, ipc_handle, length, strides, dtype))
        for number, length, strides, ipc_handle in pieces
    ]


def _piece(
    of: PeerMemory,
    ipc_handle: cuda_ipc.IpcHandle,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
) -> Any:
    _, size_bytes = cuda_ipc.extent(shape, strides, dtype.itemsize)
    return cuda_ipc.array_at(of.mapped(ipc_handle, size_bytes), shape, strides, dtype)
