"""Reads of blocks in a worker's store, without moving them between its levels.

``worker.data[key]`` brings a spilled block back into memory, and spills others to make room. When
two threads do so at the same time, one of them gets a `KeyError`. So readers look into each level
of the store in turn, and change none of them.

A NumPy block on disk is memory-mapped: a read of a region loads only its pages. Dask may remove the
file at any time; the pages remain until the array is released. Blocks that Dask has compressed, and
Python objects, are read as a whole.

dask-cuda spills CuPy blocks in Dask's serialised form: a header, and the bytes in host memory. They
are read there like NumPy blocks, region by region, and take no memory of their GPU.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from distributed.spill import SpillBuffer
from zict import Buffer, Cache, File, Func

from dask_p2p.backends.device import private_stream
from dask_p2p.backends.host.pinned import bases
from dask_p2p.types import Array, Key


def find_in_memory(data: Any, key: Key) -> Any:
    """Return a block that is not spilled; raise `KeyError` if there is none.

    A CuPy block counts as not spilled only in GPU memory.
    """
    for level in _memory_levels(data):
        try:
            block = level[key]
        except KeyError:
            continue
        if not _is_serialized(block):
            return block
    raise KeyError(key)


def holds(data: Any, key: Key) -> bool:
    """Return whether a store has a block, on any level.

    In dask-cuda's store, ``key in data`` would bring the block back to the GPU.
    """
    return any(key in level for level in (*_memory_levels(data), *_slow_levels(data)))


def is_spilled(data: Any, key: Key) -> bool:
    """Return whether a store has a block, but spilled."""
    if isinstance(data, SpillBuffer):
        return key not in data.memory and key in data.disk  # a lookup would mark it as recent
    try:
        find_in_memory(data, key)
    except KeyError:
        return holds(data, key)
    return False


def read_spilled(data: Any, key: Key) -> Any:
    """Return a spilled block, which stays spilled; raise `KeyError` if there is none.

    A CuPy block is returned as a NumPy view of its host memory. If its serialised form is unknown,
    it is restored on the current GPU, and the caller must wait for the copy.
    """
    for level in (*_memory_levels(data), *_slow_levels(data)):
        with suppress(KeyError, FileNotFoundError):  # just moved to the next level
            return _restored(_mapped(level, key))
    raise KeyError(key)


def is_mapped(block: Any) -> bool:
    """Return whether a block is memory-mapped, so that keeping it takes no memory."""
    return any(isinstance(base, mmap.mmap) for base in bases(block))


def on_spilled(data: Any, function: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Register a function that is called with the key and value of each block to be spilled.

    The spilling thread calls it, and then frees the block if no other references are left.
    Returns a function that ends the registration.
    """
    ending = ExitStack()
    stores = (data, getattr(data, "device_buffer", None), getattr(data, "host_buffer", None))
    for store in stores:
        if isinstance(store, Buffer):
            store.fast_to_slow_callbacks.append(function)
            ending.callback(store.fast_to_slow_callbacks.remove, function)
    return ending.close


def _memory_levels(data: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(data, SpillBuffer):
        yield data.memory
    elif _is_device_host_file(data):
        yield data.others
        yield data.device
        yield data.host  # NumPy blocks, and serialised CuPy blocks
    else:
        yield data


def _slow_levels(data: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(data, SpillBuffer):
        yield data.disk
    elif _is_device_host_file(data) and data.disk is not None:
        yield data.host_buffer.slow


def _mapped(level: Mapping[Any, Any], key: Key) -> Any:
    """Return an item of a level; arrays of an item in a file are memory-mapped."""
    files: Any = level
    if isinstance(level, Cache):  # holds weak references to blocks
        with suppress(KeyError):
            return level.cache[key]  # still referenced elsewhere
        files = level.data
    if not isinstance(files, Func) or not isinstance(files.d, File):
        return level[key]
    names: Mapping[Any, str] = files.d.filenames
    path = os.path.join(files.d.directory, names[key])
    with open(path, "rb") as file:
        # Private and writable: Dask copies arrays that are read-only.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return files.load(memoryview(content))


def _is_serialized(block: Array) -> bool:
    module = _device_host_file()
    return module is not None and isinstance(block, module.DeviceSerialized)


def _restored(block: Array) -> Any:
    if not _is_serialized(block):
        return block
    if (view := _host_view(block)) is not None:
        return view
    restore: Callable[[Any], Any] = _device_host_file().host_to_device
    with private_stream():
        return restore(block)


def _host_view(block: Any) -> np.ndarray[Any, Any] | None:
    """Return a NumPy view of a serialised CuPy block; None if its form is unknown.

    The known form is that of `distributed.protocol.cupy`, in dask-cuda's `DeviceSerialized`.
    """
    try:
        header, (frame,) = block.header["sub-header"], block.frames
        raw = np.frombuffer(frame, np.uint8)
        view = np.ndarray(header["shape"], header["typestr"], raw, 0, header["strides"])
        package, _, name = block.header["type"].rpartition(".")
        is_known = (package.partition(".")[0], name) == ("cupy", "ndarray")
    except (AttributeError, KeyError, TypeError, ValueError, BufferError):
        return None
    if not is_known or block.header["serializer"] != "dask" or view.nbytes != raw.nbytes:
        return None
    view.flags.writeable = False
    return view


def _is_device_host_file(data: Any) -> bool:
    module = _device_host_file()
    return module is not None and isinstance(data, module.DeviceHostFile)


def _device_host_file() -> Any:
    """Return dask-cuda's module if it is imported, since only that module makes such stores."""
    return sys.modules.get("dask_cuda.device_host_file")
