"""Blocks compared with the shape and the dtype that their Dask array declares."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dask_p2p.backends import backend_for
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.types import Array, Key


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
