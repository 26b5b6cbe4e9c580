"""Checksums of regions, where the option ``p2p.checksum`` asks for them.

A sum starts from what was asked for, key and box. So a region that is whole, but is the answer to
another request, or to what became of this one on its way, has another sum too.
"""

from __future__ import annotations

import zlib
from typing import Any

from dask_p2p.backends.checksum import ALGORITHMS, checksum
from dask_p2p.errors import TransferError
from dask_p2p.layout import Box
from dask_p2p.transports.reading import Request
from dask_p2p.types import Array, Key

__all__ = ["algorithm_of", "check_sum", "region_sum"]

_SUMS = 2**64


def region_sum(key: Key, box: Box, region: Array, algorithm: str) -> int:
    """Return the checksum of a region of a block. This is nothing for an event loop."""
    asked = repr((key, tuple(map(tuple, box))))  # which escapes what cannot be encoded
    return checksum(region, algorithm, zlib.crc32(asked.encode()))


def algorithm_of(name: Any) -> str:
    """Return the name of an algorithm that another worker sent; `ValueError` if it is none."""
    if type(name) is not str or name not in ALGORITHMS:
        raise ValueError(f"checksum: expected one of {', '.join(ALGORITHMS)}")
    return name


def check_sum(
    transport: str, block: Request, box: Box, local: int, remote: Any, algorithm: str
) -> None:
    """Raise `TransferError` unless a region's sum is the same here and there."""
    if type(remote) is not int or not 0 <= remote < _SUMS:
        raise TransferError(f"{transport}: {block.holder} sent no checksum of {box} of {block}")
    if local != remote:
        reason = "what arrives is not what was sent, by its checksum"
        raise TransferError(
            f"{transport}: {box} of {block} arrived changed: its {algorithm} is {local:#x} here, "
            f"and was {remote:#x} where it was sent",
            f"{transport}: {reason}",
        )
