"""Descriptors: what a holder publishes of a block, by which its memory is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dask_p2p.errors import TransferError
from dask_p2p.interprocess.requests import (
    checked_shape,
    checked_strides,
    checked_text,
)
from dask_p2p.transports.reading import Request
from dask_p2p.transports.replies import check_dtype_text, dtype_text, mismatch

__all__ = ["Descriptor"]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a block is, and what it is."""

    key: str  # its repr
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: str
    place: Mapping[str, Any]  # where it is, as the transport describes it

    def text(self) -> bytes:
        # Not by `asdict`, which copies all that there is in the fields.
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def parse(cls, text: bytes, block: Request) -> Descriptor:
        """Read a descriptor; refuse one that does not describe the block."""
        try:
            descriptor = _read(text)
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise TransferError(f"the descriptor of {block} cannot be read: {exc}") from exc
        if descriptor.key != repr(block.key):
            raise TransferError(f"the descriptor of {block} is that of {descriptor.key}")
        if descriptor.shape != tuple(block.shape):
            declared = f"{block.dtype} {block.shape}"
            raise mismatch(block, declared, f"{descriptor.dtype} {descriptor.shape}")
        check_dtype_text(block, dtype_text(block.dtype), descriptor.dtype)
        return descriptor


@lru_cache(maxsize=1024)  # the tasks of a worker read the same blocks, one task after the other
def _read(text: bytes) -> Descriptor:
    fields = json.loads(text)
    shape = checked_shape(fields["shape"])
    strides = checked_strides(fields["strides"], shape)
    checked_text("dtype", fields["dtype"])
    return Descriptor(**{**fields, "shape": shape, "strides": strides})
