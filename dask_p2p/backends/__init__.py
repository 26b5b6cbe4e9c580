"""Array libraries: one `Backend` for each, looked up by an array or by name.

::

    src  0 1 2        permute_into(dst, src, axes=(1, 0))        dst  0 3
         3 4 5     ------------------------------------->             1 4
                                                                      2 5

>>> import numpy as np
>>> from dask_p2p.backends import backend_for
>>> src = np.arange(6).reshape(2, 3)
>>> backend = backend_for(src)
>>> dst = backend.empty((3, 2), src.dtype)
>>> backend.permute_into(dst, src, (1, 0))
>>> dst
array([[0, 3],
       [1, 4],
       [2, 5]])
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from dask_p2p.backends.base import MOST_UNREAD as MOST_UNREAD
from dask_p2p.backends.base import PLAIN
from dask_p2p.backends.base import SLOTS as SLOTS
from dask_p2p.backends.base import Backend as Backend
from dask_p2p.backends.base import Timer as Timer
from dask_p2p.backends.base import memory_order as memory_order
from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.device_queue import DeviceQueue
from dask_p2p.backends.host import HostQueue
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.errors import BlockMismatchError, TransferError, UnsupportedArrayError
from dask_p2p.types import Array, Key

#: Queues of work, with the interface of `HostQueue`.
Queue: TypeAlias = HostQueue | DeviceQueue
#: All array libraries, by name. A worker computes with the first one in use.
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (CUPY, NUMPY)}


def as_array(block: Array) -> Any:
    """Return a block as a plain array, also if it is a scalar, as from NumPy's reductions."""
    is_of_numpy = type(block) in PLAIN or isinstance(block, np.generic)
    return np.asarray(block) if is_of_numpy else block


def backend_for(block: Array) -> Backend:
    """Return the backend of a block, an array or a NumPy scalar.

    Raises `UnsupportedArrayError` if copies of the block's bytes would not keep its values, or if
    its library has no backend.
    """
    block = as_array(block)
    backend = _backend_of(block)
    backend.check(block)
    return backend


def backend_named(name: str) -> Backend:
    """Return the backend of this name, without importing its library.

    Raises `UnsupportedArrayError` for any other name.
    """
    backend = BACKENDS.get(name)
    if backend is None:
        raise UnsupportedArrayError(
            f"expected one of the array libraries {', '.join(BACKENDS)}, got {name!r}. "
            "Convert the blocks with map_blocks(np.asarray) or map_blocks(cupy.asarray) first."
        )
    return backend


def worker_backend() -> Backend:
    """Return the backend that this process probably computes with."""
    return next(backend for backend in BACKENDS.values() if backend.is_in_use())


def device_of(*blocks: Any) -> AbstractContextManager[Any]:
    """Return a context that makes the GPU of these blocks the current one.

    The current GPU stays the same for NumPy blocks, without blocks, and for blocks on several GPUs
    of this process.
    """
    devices = {}
    for block in blocks:
        device = _backend_of(block).device_of(block)
        if device is not None:
            devices[device.id] = device
    return devices.popitem()[1] if len(devices) == 1 else nullcontext()


def checksum(array: Array) -> int:
    """Return a checksum of an array's bytes, which blocks; see `Backend.checksum`."""
    return backend_for(array).checksum(array)


def _backend_of(block: Array) -> Backend:
    kind = type(block)
    backend = BACKENDS.get(kind.__module__.partition(".")[0])
    if backend is None:
        conversion = "map_blocks(np.asarray) or map_blocks(cupy.asarray)"
        for method in ("toarray", "todense"):  # sparse: of SciPy and CuPy, of PyData
            if hasattr(block, method):
                conversion = f"map_blocks(lambda block: block.{method}())"
                break
        raise UnsupportedArrayError(
            f"expected an array of {' or '.join(b.title for b in BACKENDS.values())}, got "
            f"{kind.__module__}.{kind.__qualname__}. Convert the blocks first: {conversion}."
        )
    return backend


def checked_block(array: Array, key: Key, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Return a block in its declared dtype. Raise `BlockMismatchError` if it differs otherwise.

    Without a dtype only the shape is compared. Not all NumPy dtypes can be sent as text, so the
    reader compares them when it has the data.
    """
    backend_for(array)  # rejects masked arrays, and others that are more than their bytes
    block = array if dtype is None else in_dtype(array, dtype)
    if tuple(array.shape) != tuple(shape) or block is None:
        declared = f"{tuple(shape)}" if dtype is None else f"{dtype} {tuple(shape)}"
        raise mismatch(f"block {key!r}", declared, f"{array.dtype} {tuple(array.shape)}")
    return block


def in_dtype(array: Array, dtype: Any) -> Any:
    """Return an array in the declared dtype; None if the dtypes differ in more than byte order.

    Dask converts arrays that a client sends to the native byte order, but declares the original.
    """
    if array.dtype == dtype:
        return array
    if backend_for(array).on_device or array.dtype.newbyteorder("=") != dtype.newbyteorder("="):
        return None
    return array.astype(dtype)


@lru_cache(maxsize=64)  # NumPy builds the name at each call, which takes most of the time
def dtype_text(dtype: Any) -> str:
    """Return a text for a dtype, equal for equal dtypes and different for all others.

    For comparisons only: not all NumPy dtypes can be made from text.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{shape} of {dtype_text(base)}"
    text = f"{dtype.name} {dtype.str}"
    if dtype.names is None:
        return text
    # NumPy's own text of a structured dtype has only the total size, not the fields.
    fields = ((name, *dtype.fields[name][:2]) for name in dtype.names)
    return f"{text} {[(name, offset, dtype_text(field)) for name, field, offset in fields]}"


def check_dtype_text(block: Any, declared: str, real: str) -> None:
    """Raise unless a block has the declared dtype, for a transport that moves unconverted bytes.

    Raises `TransferError` if only the byte order differs, as comm can convert the block. Raises
    `BlockMismatchError` for any other difference.
    """
    if declared == real:
        return
    if declared.replace(">", "<") == real.replace(">", "<"):
        raise TransferError(
            f"{block} is declared as {declared}, but it is {real}: only comm changes the byte "
            f"order. Name it in p2p.transports.order, or correct the dtype",
            scope="region",
        )
    raise mismatch(block, declared, real)


def mismatch(block: Any, declared: Any, real: Any) -> BlockMismatchError:
    """Return the error for a block that differs from its Dask array's declaration."""
    return BlockMismatchError(
        f"{block} is declared as {declared}, but it is {real}. Correct the chunks or the dtype "
        f"where the array is made (map_blocks, from_delayed, ...)."
    )
