"""Checksums of regions, for the option ``p2p.checksum``.

A sum starts from the requested key and box. Therefore an intact region of a different request, or
of a request that was corrupted, has a different sum too.
"""

from __future__ import annotations

import zlib
from typing import Any

from dask_p2p.backends.kernels.checksum import ALGORITHMS, checksum
from dask_p2p.errors import TransferError
from dask_p2p.geometry import Box
from dask_p2p.transports.base import Request
from dask_p2p.types import Array, Key

_SUMS = 2**64


def region_sum(key: Key, box: Box, region: Array, algorithm: str) -> int:
    """Return the checksum of a region of a block. May block: call it from a thread."""
    asked = repr((key, tuple(map(tuple, box))))  # escapes characters that cannot be encoded
    return checksum(region, algorithm, zlib.crc32(asked.encode()))


def check_sum(block: Request, box: Box, region: Array, sent: Any) -> None:
    """Raise `TransferError` unless a region has the checksum that its holder sent.

    `sent` is a pair of the algorithm's name and the sum. May block: call it from a thread.
    """
    try:
        algorithm, remote = sent
        is_known = type(algorithm) is str and algorithm in ALGORITHMS
        is_sum = is_known and type(remote) is int and 0 <= remote < _SUMS
    except (TypeError, ValueError):
        is_sum = False
    if not is_sum:
        raise TransferError(
            f"{block.holder} sent no checksum of {box} of {block}, but {sent!r:.100}"
        )
    local = region_sum(block.key, box, region, algorithm)
    if local != remote:
        raise TransferError(
            f"{box} of {block} arrived changed: its {algorithm} is {local:#x} here, "
            f"and was {remote:#x} where it was sent",
            "regions arrive with wrong checksums",
        )
