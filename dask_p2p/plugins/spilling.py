"""Blocks in a worker's store, read without moving them.

``worker.data[key]`` brings a spilled block back into memory, and spills others for it. When two
threads do that at the same time, one of them gets a `KeyError`. So threads that read
blocks read the levels of a store one by one, and change none of them.

A block of NumPy on disk is mapped: an array whose memory is the file. A region of it takes the
pages that it lies on, and no more. Dask may remove the file at any time: the pages stay until the
array is gone. Blocks that Dask has compressed, and Python objects, are read as a whole.

dask-cuda spills CuPy blocks as Dask serialises them: a header, and their bytes in host memory.
There they are read like NumPy blocks, region by region, and take no room on the GPU that they had
to leave.
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
from dask_p2p.backends.pinned import bases
from dask_p2p.types import Array, Key


def find_in_memory(data: Any, key: Key) -> Any:
    """Return a block that is in memory of its own kind; `KeyError` if it is not."""
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

    ``key in data`` would bring the block back from the host, in dask-cuda's store.
    """
    return any(key in level for level in (*_memory_levels(data), *_slow_levels(data)))


def is_spilled(data: Any, key: Key) -> bool:
    """Return whether a block is there, but not in memory of its own kind."""
    if isinstance(data, SpillBuffer):
        return key not in data.memory and key in data.disk  # to look it up would make it recent
    try:
        find_in_memory(data, key)
    except KeyError:
        return holds(data, key)
    return False


def read_spilled(data: Any, key: Key) -> Any:
    """Return a spilled block, and leave it where it is; `KeyError` if there is none.

    One of CuPy is returned as a NumPy array in the memory where it lies. If it lies there in a form
    that is not known, it is made anew on the current GPU, and has to be waited for.
    """
    for level in (*_memory_levels(data), *_slow_levels(data)):
        with suppress(KeyError, FileNotFoundError):  # moved on just now
            return _restored(_mapped(level, key))
    raise KeyError(key)


def is_mapped(block: Any) -> bool:
    """Return whether the memory of a block is that of a file, which takes nothing to keep."""
    return any(isinstance(base, mmap.mmap) for base in bases(block))


def on_spilled(data: Any, function: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Have a function called with each block that a store spills, and its key.

    The thread that spills calls it. Right after, the block is freed, if no references are left.
    Return a function that ends this.
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
        yield data.host  # blocks of NumPy, and serialised ones of CuPy
    else:
        yield data


def _slow_levels(data: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(data, SpillBuffer):
        yield data.disk
    elif _is_device_host_file(data) and data.disk is not None:
        yield data.host_buffer.slow


def _mapped(level: Mapping[Any, Any], key: Key) -> Any:
    """Return an item of a level; of one in a file, the arrays are that file, mapped."""
    files: Any = level
    if isinstance(level, Cache):  # of weak references
        with suppress(KeyError):
            return level.cache[key]  # it is in use somewhere
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
    """Return a serialised CuPy block as an array of host memory; None if it is not as expected.

    It is as `distributed.protocol.cupy` makes it, for dask-cuda's `DeviceSerialized`.
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
    """Return dask-cuda's module, if this worker has it: nobody else makes such stores."""
    return sys.modules.get("dask_cuda.device_host_file")
